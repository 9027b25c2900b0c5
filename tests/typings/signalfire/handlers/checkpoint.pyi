from handlers.checkpoint import *
