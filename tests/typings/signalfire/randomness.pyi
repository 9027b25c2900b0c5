from engine.randomness import *
