from handlers.perplexity import *
