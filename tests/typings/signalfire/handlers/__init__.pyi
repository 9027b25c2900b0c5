from handlers import *
