from engine.ablation.plan import *
