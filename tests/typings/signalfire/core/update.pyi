from engine.core.update import *
