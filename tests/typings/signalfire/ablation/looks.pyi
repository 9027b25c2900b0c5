from engine.ablation.looks import *
