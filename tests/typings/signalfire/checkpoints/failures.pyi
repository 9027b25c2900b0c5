from engine.checkpoints.failures import *
