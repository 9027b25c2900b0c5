from engine.ablation.orders import *
