from engine.unfinished import *
