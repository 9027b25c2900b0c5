from engine.ablation.shared import *
