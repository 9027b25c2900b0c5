from engine.resuming.iterators import *
