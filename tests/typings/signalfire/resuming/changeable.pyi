from engine.resuming.changeable import *
