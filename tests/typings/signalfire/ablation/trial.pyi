from engine.ablation.trial import *
