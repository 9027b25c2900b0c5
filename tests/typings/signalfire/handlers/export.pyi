from handlers.export import *
