from handlers.penalty import *
