from engine.findings.connected import *
