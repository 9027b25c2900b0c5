from engine.distributed.sums import *
