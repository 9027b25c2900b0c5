from engine.ablation.stored import *
