from engine.updates.places import *
