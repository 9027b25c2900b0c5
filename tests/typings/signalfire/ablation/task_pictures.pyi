from engine.ablation.task_pictures import *
