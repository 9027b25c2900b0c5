from engine.past import *
