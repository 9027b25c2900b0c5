from engine.traces.contents import *
