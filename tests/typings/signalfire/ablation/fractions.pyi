from engine.ablation.fractions import *
