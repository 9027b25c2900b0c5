from engine.updates.spec import *
