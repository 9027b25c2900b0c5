from engine.findings.other_optimizers import *
