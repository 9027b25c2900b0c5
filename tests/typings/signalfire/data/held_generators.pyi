from engine.data.held_generators import *
