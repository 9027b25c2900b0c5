from handlers.auto_clip import *
