from engine.ablation.runs import *
