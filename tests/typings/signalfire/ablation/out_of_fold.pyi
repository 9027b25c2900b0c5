from engine.ablation.out_of_fold import *
