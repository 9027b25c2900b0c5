from engine.core.regions import *
