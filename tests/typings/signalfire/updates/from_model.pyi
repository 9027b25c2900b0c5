from engine.updates.from_model import *
