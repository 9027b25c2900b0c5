from handlers.model_summary import *
