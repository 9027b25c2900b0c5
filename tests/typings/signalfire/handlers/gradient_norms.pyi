from handlers.gradient_norms import *
