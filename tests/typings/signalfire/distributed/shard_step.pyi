from engine.distributed.shard_step import *
