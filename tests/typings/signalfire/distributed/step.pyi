from engine.distributed.step import *
