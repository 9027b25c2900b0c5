from engine.resuming.copies import *
