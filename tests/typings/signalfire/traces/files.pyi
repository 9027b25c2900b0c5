from engine.traces.files import *
