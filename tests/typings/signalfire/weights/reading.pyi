from engine.weights.reading import *
