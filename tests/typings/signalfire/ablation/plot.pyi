from engine.ablation.plot import *
