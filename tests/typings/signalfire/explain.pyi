from engine.explain import *
