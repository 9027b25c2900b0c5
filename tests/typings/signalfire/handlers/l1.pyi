from handlers.l1 import *
