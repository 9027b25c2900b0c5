from engine.ablation.rows import *
