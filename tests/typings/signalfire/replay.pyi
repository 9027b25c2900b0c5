from engine.replay import *
