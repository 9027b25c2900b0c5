from handlers.cutmix import *
