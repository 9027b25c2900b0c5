from engine.blame import *
