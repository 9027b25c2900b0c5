from engine.ablation.identity import *
