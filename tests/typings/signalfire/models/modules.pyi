from engine.models.modules import *
