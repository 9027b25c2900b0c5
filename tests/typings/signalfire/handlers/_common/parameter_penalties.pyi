from handlers._common.parameter_penalties import *
