from handlers._common.batches import *
