from engine.evaluation_findings import *
