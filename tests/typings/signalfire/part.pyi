from engine.part import *
