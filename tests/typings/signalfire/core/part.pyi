from engine.core.part import *
