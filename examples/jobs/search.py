"""Search for a learning rate and a batch size with Optuna, which ends trials that fall
behind.

Prints how many trials it ended, the best hyperparameters, and the accuracy that they
reach.
"""

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import Accuracy, OptunaPruning, Seeding, Validation

images, digits = load_digits(return_X_y=True)
x, y = torch.tensor(images).float() / 16, torch.tensor(digits)
val = DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=200)


def objective(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    size = trial.suggest_categorical("batch_size", [16, 32, 64, 128])
    seed_everything(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trainer = Engine(
        Update.supervised(nn.functional.cross_entropy, torch.optim.AdamW, lr=lr),
        model,
        seed=0,
    )
    trainer.attach(
        Seeding(),
        Validation(val, accuracy=Accuracy()),
        OptunaPruning(trial, "val_accuracy"),
    )
    train = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=size, shuffle=True)
    return float(trainer.run(train, max_epochs=5).metrics["val_accuracy"])


sampler, pruner = (
    optuna.samplers.TPESampler(seed=0),
    optuna.pruners.MedianPruner(n_startup_trials=3),
)
study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
study.optimize(objective, n_trials=12)
pruned = sum(trial.state.name == "PRUNED" for trial in study.trials)
print(pruned, "pruned", study.best_params, study.best_value)
