from handlers.remote_logger import *
