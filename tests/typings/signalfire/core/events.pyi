from engine.core.events import *
