from handlers._common import *
