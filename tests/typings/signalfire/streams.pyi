from engine.streams import *
