from engine.findings.rules import *
