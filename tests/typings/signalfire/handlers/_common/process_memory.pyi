from handlers._common.process_memory import *
