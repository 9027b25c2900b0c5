from engine.findings.own_schedulers import *
