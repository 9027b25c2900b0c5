from handlers.optuna_pruning import *
