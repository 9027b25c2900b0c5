from engine.runs.wiring import *
