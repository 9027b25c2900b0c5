from engine.ablation.formats import *
