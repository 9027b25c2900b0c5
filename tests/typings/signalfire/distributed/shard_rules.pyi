from engine.distributed.shard_rules import *
