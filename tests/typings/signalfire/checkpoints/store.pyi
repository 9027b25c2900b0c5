from engine.checkpoints.store import *
