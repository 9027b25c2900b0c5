from engine.copies import *
