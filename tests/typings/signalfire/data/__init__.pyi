from engine.data import *
