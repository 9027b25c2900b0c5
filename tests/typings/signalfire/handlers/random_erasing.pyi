from handlers.random_erasing import *
