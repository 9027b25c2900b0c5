from engine.distributed.liveness import *
