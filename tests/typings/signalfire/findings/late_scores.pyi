from engine.findings.late_scores import *
