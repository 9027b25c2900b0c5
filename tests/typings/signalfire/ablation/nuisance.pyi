from engine.ablation.nuisance import *
