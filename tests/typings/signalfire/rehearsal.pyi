from engine.rehearsal import *
