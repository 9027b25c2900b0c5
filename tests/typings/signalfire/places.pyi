from engine.places import *
