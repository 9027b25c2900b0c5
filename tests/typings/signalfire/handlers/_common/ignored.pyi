from handlers._common.ignored import *
