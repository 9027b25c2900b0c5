from engine.traces.watched import *
