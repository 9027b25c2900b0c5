from engine.model_rules import *
