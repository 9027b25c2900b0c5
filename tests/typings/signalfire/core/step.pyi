from engine.core.step import *
