from handlers.fast_dev_run import *
