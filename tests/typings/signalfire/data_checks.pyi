from engine.data_checks import *
