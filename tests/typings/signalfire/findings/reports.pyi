from engine.findings.reports import *
