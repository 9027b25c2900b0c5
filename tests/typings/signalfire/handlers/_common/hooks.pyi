from handlers._common.hooks import *
