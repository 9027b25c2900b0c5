from engine.devices import *
