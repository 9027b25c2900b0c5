from handlers._common.mixing import *
