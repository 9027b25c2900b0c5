from engine.traces import *
