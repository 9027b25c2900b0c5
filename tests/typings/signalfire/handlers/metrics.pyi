from handlers.metrics import *
