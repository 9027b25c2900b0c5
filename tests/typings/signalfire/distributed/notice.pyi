from engine.distributed.notice import *
