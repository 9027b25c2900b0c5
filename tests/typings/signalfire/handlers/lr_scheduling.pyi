from handlers.lr_scheduling import *
