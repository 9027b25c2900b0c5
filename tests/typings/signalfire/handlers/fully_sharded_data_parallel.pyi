from handlers.fully_sharded_data_parallel import *
