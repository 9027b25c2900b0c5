from engine.ablation.divergence import *
