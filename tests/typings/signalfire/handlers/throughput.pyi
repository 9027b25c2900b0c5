from handlers.throughput import *
