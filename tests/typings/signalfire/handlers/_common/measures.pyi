from handlers._common.measures import *
