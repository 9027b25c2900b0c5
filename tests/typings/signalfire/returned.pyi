from engine.returned import *
