from engine.boundary import *
