from handlers.lookahead import *
