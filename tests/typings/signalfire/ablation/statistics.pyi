from engine.ablation.statistics import *
