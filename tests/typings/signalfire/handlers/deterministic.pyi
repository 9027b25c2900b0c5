from handlers.deterministic import *
