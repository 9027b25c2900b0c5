from engine.resuming import *
