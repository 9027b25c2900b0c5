from engine.weights.writing import *
