from handlers.tensor_parallel import *
