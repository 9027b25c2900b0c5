from engine.ablation.sentences import *
