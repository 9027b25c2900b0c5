from engine.loop import *
