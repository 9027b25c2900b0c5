from engine.ablation.tasks import *
