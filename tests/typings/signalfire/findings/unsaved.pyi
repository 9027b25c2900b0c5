from engine.findings.unsaved import *
