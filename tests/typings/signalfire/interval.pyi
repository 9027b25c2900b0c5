from engine.interval import *
