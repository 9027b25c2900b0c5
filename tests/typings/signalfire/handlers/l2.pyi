from handlers.l2 import *
