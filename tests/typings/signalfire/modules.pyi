from engine.modules import *
