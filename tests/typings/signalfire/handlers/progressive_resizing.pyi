from handlers.progressive_resizing import *
