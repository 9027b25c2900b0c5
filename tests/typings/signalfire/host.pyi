from engine.host import *
