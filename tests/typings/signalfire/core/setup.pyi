from engine.core.setup import *
