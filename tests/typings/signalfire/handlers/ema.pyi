from handlers.ema import *
