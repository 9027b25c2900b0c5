from engine.declarations import *
