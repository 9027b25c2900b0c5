from engine.tuning import *
