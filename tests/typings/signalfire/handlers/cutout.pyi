from handlers.cutout import *
