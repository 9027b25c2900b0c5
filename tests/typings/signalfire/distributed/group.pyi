from engine.distributed.group import *
