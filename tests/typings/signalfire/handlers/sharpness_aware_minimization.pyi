from handlers.sharpness_aware_minimization import *
