from engine.authoring.batches import *
