from engine.ablation.ray_executor import *
