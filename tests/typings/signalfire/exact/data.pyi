from engine.exact.data import *
