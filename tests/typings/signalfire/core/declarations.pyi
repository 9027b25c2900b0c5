from engine.core.declarations import *
