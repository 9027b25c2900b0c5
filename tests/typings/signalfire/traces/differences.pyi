from engine.traces.differences import *
