from engine.events import *
