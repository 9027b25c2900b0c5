from engine.tuning.batch_size import *
