from engine.ablation.planned import *
