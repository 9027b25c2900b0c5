from engine.exact.random import *
