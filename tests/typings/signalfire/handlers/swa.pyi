from handlers.swa import *
