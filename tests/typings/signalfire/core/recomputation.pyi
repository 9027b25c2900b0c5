from engine.core.recomputation import *
