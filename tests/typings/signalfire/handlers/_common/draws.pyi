from handlers._common.draws import *
