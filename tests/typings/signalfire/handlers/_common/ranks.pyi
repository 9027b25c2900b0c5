from handlers._common.ranks import *
