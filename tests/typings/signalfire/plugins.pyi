from engine.plugins import *
