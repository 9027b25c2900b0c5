from engine.traces.digests import *
