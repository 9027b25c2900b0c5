from engine.ablation.task_report import *
