from handlers._common.sender import *
