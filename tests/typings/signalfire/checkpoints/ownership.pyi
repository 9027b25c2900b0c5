from engine.checkpoints.ownership import *
