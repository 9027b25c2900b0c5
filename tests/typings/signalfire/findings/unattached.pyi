from engine.findings.unattached import *
