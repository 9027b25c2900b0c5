from engine.findings.calls import *
