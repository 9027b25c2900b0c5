from engine.traces.picture import *
