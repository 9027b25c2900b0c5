from engine.authoring.checks import *
