from engine.ablation.cost_ratios import *
