from engine.core.bus import *
