from engine.restore import *
