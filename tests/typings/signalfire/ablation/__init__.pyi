from engine.ablation import *
