from engine.resuming.unfinished import *
