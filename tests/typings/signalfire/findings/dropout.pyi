from engine.findings.dropout import *
