from handlers.predictions import *
