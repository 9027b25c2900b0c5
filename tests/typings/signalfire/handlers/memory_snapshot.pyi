from handlers.memory_snapshot import *
