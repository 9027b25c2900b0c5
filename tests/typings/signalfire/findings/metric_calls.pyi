from engine.findings.metric_calls import *
