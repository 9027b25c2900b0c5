from engine.ablation.kfold import *
