from engine.findings.evaluation_findings import *
