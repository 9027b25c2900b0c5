from engine.findings.returned import *
