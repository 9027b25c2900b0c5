from engine.planning import *
