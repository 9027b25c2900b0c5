from handlers.distributed_data_parallel import *
