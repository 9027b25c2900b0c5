from engine.findings.composition import *
