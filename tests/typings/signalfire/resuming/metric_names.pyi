from engine.resuming.metric_names import *
