from engine.rules import *
