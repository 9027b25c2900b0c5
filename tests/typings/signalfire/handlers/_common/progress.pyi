from handlers._common.progress import *
