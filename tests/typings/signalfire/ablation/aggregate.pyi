from engine.ablation.aggregate import *
