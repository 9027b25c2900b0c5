from engine.core.seeds import *
