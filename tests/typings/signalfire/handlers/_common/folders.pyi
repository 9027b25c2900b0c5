from handlers._common.folders import *
