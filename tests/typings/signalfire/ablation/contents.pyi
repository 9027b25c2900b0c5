from engine.ablation.contents import *
