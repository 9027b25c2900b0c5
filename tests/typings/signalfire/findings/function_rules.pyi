from engine.findings.function_rules import *
