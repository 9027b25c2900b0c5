from engine.ablation.verdicts import *
