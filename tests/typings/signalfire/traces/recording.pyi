from engine.traces.recording import *
