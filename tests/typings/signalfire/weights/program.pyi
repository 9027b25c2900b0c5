from engine.weights.program import *
