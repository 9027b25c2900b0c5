from engine.checkpoints.files import *
