from handlers._common.updates import *
