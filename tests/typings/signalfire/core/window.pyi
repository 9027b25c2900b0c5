from engine.core.window import *
