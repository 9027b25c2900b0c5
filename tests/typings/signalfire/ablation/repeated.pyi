from engine.ablation.repeated import *
