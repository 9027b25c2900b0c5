from engine.distributed.differences import *
