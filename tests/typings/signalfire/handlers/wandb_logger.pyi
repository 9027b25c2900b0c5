from handlers.wandb_logger import *
