from engine.weights.naming import *
