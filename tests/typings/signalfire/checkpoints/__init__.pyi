from engine.checkpoints import *
