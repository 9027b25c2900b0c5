from engine.runs.empty_data import *
