from engine.updates.optimizers import *
