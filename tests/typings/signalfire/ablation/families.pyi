from engine.ablation.families import *
