from handlers.mlflow_logger import *
