from engine.checkpoints.saver import *
