from engine.function_rules import *
