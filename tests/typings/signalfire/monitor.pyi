from engine.monitor import *
