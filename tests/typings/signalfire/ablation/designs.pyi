from engine.ablation.designs import *
