from engine.distributed.processes import *
