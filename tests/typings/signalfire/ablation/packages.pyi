from engine.ablation.packages import *
