from engine.weights.averages import *
