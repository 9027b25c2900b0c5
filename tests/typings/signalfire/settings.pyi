from engine.settings import *
