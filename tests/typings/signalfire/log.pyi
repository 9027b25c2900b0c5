from engine.log import *
