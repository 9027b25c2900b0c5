from engine.weights import *
