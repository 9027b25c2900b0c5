from handlers.mixup import *
