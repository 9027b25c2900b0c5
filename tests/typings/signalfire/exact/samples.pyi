from engine.exact.samples import *
