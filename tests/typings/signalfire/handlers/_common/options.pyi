from handlers._common.options import *
