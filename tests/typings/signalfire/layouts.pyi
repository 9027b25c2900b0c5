from engine.layouts import *
