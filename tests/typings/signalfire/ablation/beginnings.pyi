from engine.ablation.beginnings import *
