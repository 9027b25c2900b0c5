from handlers._common.peaks import *
