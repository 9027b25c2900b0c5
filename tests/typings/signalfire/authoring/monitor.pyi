from engine.authoring.monitor import *
