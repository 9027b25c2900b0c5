from engine.checkpoints.writer import *
