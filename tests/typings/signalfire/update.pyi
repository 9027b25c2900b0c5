from engine.update import *
