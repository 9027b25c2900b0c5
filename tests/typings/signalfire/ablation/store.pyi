from engine.ablation.store import *
