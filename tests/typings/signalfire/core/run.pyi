from engine.core.run import *
