from engine.step import *
