from engine.findings.setup_findings import *
