from engine.exact.lightning import *
