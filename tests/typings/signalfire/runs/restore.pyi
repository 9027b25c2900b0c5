from engine.runs.restore import *
