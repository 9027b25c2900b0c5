from handlers.preemption import *
