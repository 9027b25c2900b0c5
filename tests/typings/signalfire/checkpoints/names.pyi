from engine.checkpoints.names import *
