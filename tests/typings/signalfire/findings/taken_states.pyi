from engine.findings.taken_states import *
