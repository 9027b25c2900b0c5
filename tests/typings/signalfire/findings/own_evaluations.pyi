from engine.findings.own_evaluations import *
