from engine.ablation.results import *
