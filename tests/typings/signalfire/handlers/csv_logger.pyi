from handlers.csv_logger import *
