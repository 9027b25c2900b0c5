from handlers._common.torch_schedulers import *
