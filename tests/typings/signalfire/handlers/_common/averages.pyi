from handlers._common.averages import *
