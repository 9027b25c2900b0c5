from engine.sharded import *
