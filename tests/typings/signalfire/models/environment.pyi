from engine.models.environment import *
