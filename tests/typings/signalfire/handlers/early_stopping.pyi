from handlers.early_stopping import *
