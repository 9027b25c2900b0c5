from engine.authoring.devices import *
