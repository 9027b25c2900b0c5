from engine.runs.evaluation import *
