from engine.ablation.report import *
