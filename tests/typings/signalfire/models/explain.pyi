from engine.models.explain import *
