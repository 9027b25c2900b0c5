from engine.checkpoints.loading import *
