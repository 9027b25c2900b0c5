from engine.resuming.past import *
