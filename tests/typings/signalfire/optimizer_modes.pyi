from engine.optimizer_modes import *
