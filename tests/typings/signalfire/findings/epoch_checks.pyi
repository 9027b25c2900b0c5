from engine.findings.epoch_checks import *
