from engine.findings.first_steps import *
