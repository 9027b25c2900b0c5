from engine.ablation.joint import *
