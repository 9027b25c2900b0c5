from engine.ablation.factors import *
