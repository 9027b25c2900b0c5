from engine.core.single_process import *
