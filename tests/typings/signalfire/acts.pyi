from engine.acts import *
