from handlers.limit_batches import *
