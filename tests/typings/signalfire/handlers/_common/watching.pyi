from handlers._common.watching import *
