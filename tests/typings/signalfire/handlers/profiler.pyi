from handlers.profiler import *
