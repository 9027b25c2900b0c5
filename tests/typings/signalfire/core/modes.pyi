from engine.core.modes import *
