from handlers._common.penalties import *
