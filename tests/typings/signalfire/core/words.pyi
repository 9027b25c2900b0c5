from engine.core.words import *
