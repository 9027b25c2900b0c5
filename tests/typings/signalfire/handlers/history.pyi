from handlers.history import *
