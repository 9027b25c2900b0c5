from engine.data.left_out import *
