from engine.authoring.planning import *
