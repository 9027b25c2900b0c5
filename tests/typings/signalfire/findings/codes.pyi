from engine.findings.codes import *
