from engine.authoring.plain import *
