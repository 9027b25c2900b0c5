from handlers._common.module_patterns import *
