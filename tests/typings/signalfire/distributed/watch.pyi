from engine.distributed.watch import *
