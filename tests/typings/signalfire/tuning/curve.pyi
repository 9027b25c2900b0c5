from engine.tuning.curve import *
