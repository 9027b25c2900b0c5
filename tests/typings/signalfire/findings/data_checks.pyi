from engine.findings.data_checks import *
