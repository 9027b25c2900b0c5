from engine.findings.parameter_rules import *
