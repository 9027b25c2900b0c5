from engine.regions import *
