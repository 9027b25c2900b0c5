from engine.core import *
