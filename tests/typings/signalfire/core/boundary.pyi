from engine.core.boundary import *
