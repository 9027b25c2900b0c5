from handlers._common.parameters import *
