from engine.ablation.metrics_report import *
