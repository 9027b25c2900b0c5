from engine.updates.optimizer_modes import *
