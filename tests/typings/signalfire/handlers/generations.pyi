from handlers.generations import *
