from engine.ablation.watched import *
