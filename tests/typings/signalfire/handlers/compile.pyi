from handlers.compile import *
