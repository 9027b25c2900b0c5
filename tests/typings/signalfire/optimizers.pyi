from engine.optimizers import *
