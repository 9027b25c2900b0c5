from engine.loss_graph import *
