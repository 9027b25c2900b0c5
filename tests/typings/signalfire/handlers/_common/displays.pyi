from handlers._common.displays import *
