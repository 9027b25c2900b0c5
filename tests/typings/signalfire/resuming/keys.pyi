from engine.resuming.keys import *
