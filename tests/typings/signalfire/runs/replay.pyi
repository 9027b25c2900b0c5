from engine.runs.replay import *
