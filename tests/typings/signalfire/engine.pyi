from engine.engine import *
