from engine.ablation.detectability import *
