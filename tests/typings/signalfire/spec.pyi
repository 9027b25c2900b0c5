from engine.spec import *
