from engine.weights.averaging import *
