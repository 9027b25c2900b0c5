from engine.tuning.rehearsal import *
