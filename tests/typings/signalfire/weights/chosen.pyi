from engine.weights.chosen import *
