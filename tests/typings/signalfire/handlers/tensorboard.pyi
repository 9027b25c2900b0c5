from handlers.tensorboard import *
