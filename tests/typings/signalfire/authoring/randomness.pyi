from engine.authoring.randomness import *
