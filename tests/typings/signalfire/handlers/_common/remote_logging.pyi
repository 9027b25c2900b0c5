from handlers._common.remote_logging import *
