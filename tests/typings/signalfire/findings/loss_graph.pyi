from engine.findings.loss_graph import *
