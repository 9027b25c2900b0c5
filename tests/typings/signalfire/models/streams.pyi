from engine.models.streams import *
