from handlers.pruning import *
