from handlers.ranks import *
