from engine.ablation.outside import *
