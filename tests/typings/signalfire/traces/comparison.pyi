from engine.traces.comparison import *
