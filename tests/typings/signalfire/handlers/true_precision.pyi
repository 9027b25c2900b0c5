from handlers.true_precision import *
