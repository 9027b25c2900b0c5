from engine.ablation.failures import *
