from engine.findings.own_weights import *
