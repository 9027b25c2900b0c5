from engine.updates import *
