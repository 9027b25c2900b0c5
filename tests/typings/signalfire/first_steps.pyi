from engine.first_steps import *
