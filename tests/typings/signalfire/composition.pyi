from engine.composition import *
