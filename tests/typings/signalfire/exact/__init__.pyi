from engine.exact import *
