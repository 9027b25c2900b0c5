from engine.findings.loss_nodes import *
