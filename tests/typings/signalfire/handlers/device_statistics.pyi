from handlers.device_statistics import *
