from handlers._common.simulated_rates import *
