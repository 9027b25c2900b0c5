from handlers.precision32 import *
