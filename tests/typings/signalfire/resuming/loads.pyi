from engine.resuming.loads import *
