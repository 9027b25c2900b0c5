from handlers.progress_bar import *
