from engine.distributed.sharded import *
