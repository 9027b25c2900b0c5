from engine.findings.layouts import *
