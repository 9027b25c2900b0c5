from engine.epoch_checks import *
