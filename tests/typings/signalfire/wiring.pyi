from engine.wiring import *
