from engine.findings.check import *
