from handlers.trace import *
