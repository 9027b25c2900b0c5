from engine.keys import *
