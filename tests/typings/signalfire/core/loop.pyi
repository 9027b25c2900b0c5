from engine.core.loop import *
