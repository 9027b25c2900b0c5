from engine.traces.bisection import *
