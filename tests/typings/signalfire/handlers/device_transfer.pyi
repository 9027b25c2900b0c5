from handlers.device_transfer import *
