from engine.findings.data_rules import *
