from engine.ablation.frames import *
