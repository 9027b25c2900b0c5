from handlers.distillation import *
