from engine.findings.target_counts import *
