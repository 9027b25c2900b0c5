from engine.checks import *
