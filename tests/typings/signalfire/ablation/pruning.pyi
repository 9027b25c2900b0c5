from engine.ablation.pruning import *
