from engine.core.feed import *
