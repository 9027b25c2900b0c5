from handlers._common.distribution import *
