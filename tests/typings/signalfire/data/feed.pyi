from engine.data.feed import *
