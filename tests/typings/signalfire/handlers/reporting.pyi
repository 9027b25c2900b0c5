from handlers.reporting import *
