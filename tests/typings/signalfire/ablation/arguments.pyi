from engine.ablation.arguments import *
