from handlers._common.look import *
