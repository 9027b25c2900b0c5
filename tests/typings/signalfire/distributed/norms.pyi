from engine.distributed.norms import *
