from engine.traces.scripts import *
