from engine.distributed import *
