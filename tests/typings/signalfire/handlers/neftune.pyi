from handlers.neftune import *
