from handlers._common.metrics import *
