from engine.runs import *
