from engine.changeable import *
