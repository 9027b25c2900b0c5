from handlers.gradient_clipping import *
