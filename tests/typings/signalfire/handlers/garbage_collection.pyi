from handlers.garbage_collection import *
