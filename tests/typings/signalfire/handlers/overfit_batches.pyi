from handlers.overfit_batches import *
