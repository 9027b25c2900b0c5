from engine.distributed.boundary import *
