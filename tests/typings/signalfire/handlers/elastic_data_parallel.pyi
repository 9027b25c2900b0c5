from handlers.elastic_data_parallel import *
