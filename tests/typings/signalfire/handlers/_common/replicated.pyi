from handlers._common.replicated import *
