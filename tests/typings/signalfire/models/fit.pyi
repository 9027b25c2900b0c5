from engine.models.fit import *
