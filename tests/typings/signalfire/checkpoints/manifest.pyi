from engine.checkpoints.manifest import *
