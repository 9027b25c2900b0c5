from engine.distributed.shards import *
