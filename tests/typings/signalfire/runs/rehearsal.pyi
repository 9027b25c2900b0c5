from engine.runs.rehearsal import *
