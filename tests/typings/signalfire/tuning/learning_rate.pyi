from engine.tuning.learning_rate import *
