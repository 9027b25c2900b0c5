from handlers._common.claims import *
