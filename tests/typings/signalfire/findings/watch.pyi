from engine.findings.watch import *
