from engine.ablation.pictures import *
