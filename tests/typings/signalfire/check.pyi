from engine.check import *
