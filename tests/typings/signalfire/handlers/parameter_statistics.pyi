from handlers.parameter_statistics import *
