from engine.ablation.paper import *
