from engine.ablation.power import *
