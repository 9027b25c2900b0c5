from engine.loads import *
