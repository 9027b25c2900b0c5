from engine.batches import *
