from engine.weights.placing import *
