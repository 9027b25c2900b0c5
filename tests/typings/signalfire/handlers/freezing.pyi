from handlers.freezing import *
