from engine.from_model import *
