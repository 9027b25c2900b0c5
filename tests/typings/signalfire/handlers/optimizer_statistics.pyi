from handlers.optimizer_statistics import *
