from engine.data.first_batches import *
