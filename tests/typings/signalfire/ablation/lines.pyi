from engine.ablation.lines import *
