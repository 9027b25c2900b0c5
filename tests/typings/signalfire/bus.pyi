from engine.bus import *
