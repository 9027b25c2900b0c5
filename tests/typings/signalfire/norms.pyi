from engine.norms import *
