from engine.fit import *
