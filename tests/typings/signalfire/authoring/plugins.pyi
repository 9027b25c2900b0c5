from engine.authoring.plugins import *
