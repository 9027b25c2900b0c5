"""Trains a model. Replace the data and the model with your own.

python train.py
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from loss_spikes import LossSpikes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update
from signalfire.handlers import EMA, Accuracy, Checkpoint, Metrics, ProgressBar, Validation

EPOCHS, BATCH = 10, 50


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points inside (0) and outside (1) of a circle."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return x, (x.square().sum(1) > 0.64).long()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


def build(seed: int, epochs: int = EPOCHS) -> tuple[Engine, Callable[[Engine], object]]:
    """The trainer, and a function that runs it; study.py calls it for each run."""
    torch.manual_seed(seed)
    model = make_model()
    update = Update.supervised(nn.functional.cross_entropy, optimizer=partial(torch.optim.Adam, lr=3e-2))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(accuracy=Accuracy()))
    trainer = Engine(update, model=model, seed=seed)
    trainer.attach(Validation(evaluator, [make_data(500, seed=1)]), EMA(0.95), LossSpikes())
    data: Iterable[Any] = DataLoader(TensorDataset(*make_data(1000, seed=0)), batch_size=BATCH, shuffle=True)
    return trainer, lambda engine: engine.run(data, max_epochs=epochs)


def main() -> None:
    trainer, run = build(seed=0)
    # Started again after an interruption, the run continues where it was.
    trainer.attach(ProgressBar(), Checkpoint("runs/first", every="1ep", resume=True))
    run(trainer)
    print(f"accuracy: {trainer.state.metrics['accuracy']:.1%}")
    print(f"spikes of the loss: iterations {trainer.find(LossSpikes).found or 'none'}")


if __name__ == "__main__":
    main()
