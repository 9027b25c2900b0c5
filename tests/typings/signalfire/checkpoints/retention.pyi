from engine.checkpoints.retention import *
