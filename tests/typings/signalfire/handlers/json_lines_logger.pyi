from handlers.json_lines_logger import *
