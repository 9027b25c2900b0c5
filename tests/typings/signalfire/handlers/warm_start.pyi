from handlers.warm_start import *
