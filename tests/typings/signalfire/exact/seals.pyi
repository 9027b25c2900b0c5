from engine.exact.seals import *
