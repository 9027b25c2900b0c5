from engine.distributed.job import *
