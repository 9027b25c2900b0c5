from engine.core.blame import *
