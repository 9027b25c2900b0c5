from handlers.straggler_detection import *
