from handlers.stochastic_depth import *
