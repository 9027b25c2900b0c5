from engine.codes import *
