from handlers._common.weight_plan import *
