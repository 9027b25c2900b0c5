from engine.findings.resumption import *
