from handlers.summary import *
