from handlers.trackio_logger import *
