"""A first run: two models, the wiring, and one handler switched off."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update
from signalfire.handlers import EMA, Accuracy, MixUp, ProgressBar, Validation

from .digits import one_dimensional_digits

__all__ = ["demo"]

SAMPLES, EPOCHS, BATCH, RATE = 1000, 40, 100, 1e-2


def logistic() -> nn.Module:
    return nn.Linear(40, 10)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def build(make_model: Callable[[], nn.Module]) -> Engine:
    """An engine that trains a model with mixup, an average of the weights, and an evaluation at the end of each epoch."""
    torch.manual_seed(0)
    model = make_model()
    update = Update.supervised(nn.functional.cross_entropy, torch.optim.Adam, lr=RATE)
    trainer = Engine(update, model=model, seed=0)
    validation = Validation([one_dimensional_digits(SAMPLES, seed=1)], accuracy=Accuracy())
    trainer.attach(validation, MixUp(0.4), EMA(0.98), ProgressBar())
    return trainer


def accuracy(make_model: Callable[[], nn.Module], without: tuple[str, ...] = ()) -> float:
    """Train a model, and return its accuracy on samples it has not seen."""
    trainer = build(make_model)
    loader = DataLoader(TensorDataset(*one_dimensional_digits(SAMPLES, seed=0)), batch_size=BATCH, shuffle=True)
    with trainer.without(*without):
        trainer.run(loader, max_epochs=EPOCHS)
    return float(trainer.state.metrics["val_accuracy"])


def demo() -> None:
    """Train two models, print the wiring, and train one of them without one of its handlers."""
    torch.set_num_threads(1)
    print(f"Training on {SAMPLES:,} one-dimensional digits and testing on {SAMPLES:,} others.\n", flush=True)
    print(f"Linear model: {accuracy(logistic):.1%} of the test digits are classified correctly.\n")
    whole = accuracy(mlp)
    print(f"MLP: {whole:.1%} of the test digits are classified correctly.\n")
    print("The engine's calls in this run, event by event:\n")
    print(build(mlp).wiring())
    print("\nThe same without mixup, in one line: with trainer.without('mixup'): trainer.run(...)\n")
    less = accuracy(mlp, without=("mixup",))
    print(f"MLP without mixup: {less:.1%}, a difference of {100 * (whole - less):+.1f} points.")
    print("This result is from a single seed. To test such a difference over several seeds, use signalfire.ablation.\n")
    print("Next: python -m signalfire new my_project")
