from handlers.label_smoothing import *
