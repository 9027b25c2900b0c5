from engine.findings.given_gradients import *
