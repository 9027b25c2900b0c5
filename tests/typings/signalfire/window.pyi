from engine.window import *
