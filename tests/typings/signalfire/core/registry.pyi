from engine.core.registry import *
