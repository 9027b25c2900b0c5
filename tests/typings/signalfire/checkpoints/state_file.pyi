from engine.checkpoints.state_file import *
