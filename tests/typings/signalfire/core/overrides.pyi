from engine.core.overrides import *
