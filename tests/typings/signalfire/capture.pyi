from engine.capture import *
