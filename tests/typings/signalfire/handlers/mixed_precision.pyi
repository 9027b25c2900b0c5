from handlers.mixed_precision import *
