from engine.evaluation import *
