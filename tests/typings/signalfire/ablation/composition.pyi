from engine.ablation.composition import *
