from engine.plain import *
