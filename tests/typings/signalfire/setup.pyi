from engine.setup import *
