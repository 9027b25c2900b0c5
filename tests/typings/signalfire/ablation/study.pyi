from engine.ablation.study import *
