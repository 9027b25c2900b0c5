from engine.own_evaluations import *
