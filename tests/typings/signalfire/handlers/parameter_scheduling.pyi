from handlers.parameter_scheduling import *
