from handlers.benchmark import *
