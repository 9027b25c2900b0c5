from engine.findings.model_rules import *
