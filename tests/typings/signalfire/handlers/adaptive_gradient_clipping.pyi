from handlers.adaptive_gradient_clipping import *
