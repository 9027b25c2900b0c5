from engine.ablation.workers import *
