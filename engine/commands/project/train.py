"""Trains a model. Replace the data and the model with your own.

python train.py
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from loss_spikes import LossSpikes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update
from signalfire.handlers import (
    EMA,
    Accuracy,
    Checkpoint,
    CSVLogger,
    DeviceTransfer,
    MixedPrecision,
    ProgressBar,
    Validation,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
    update = Update.supervised(nn.functional.cross_entropy, torch.optim.Adam, lr=3e-2)
    trainer = Engine(update, model=make_model(), seed=seed)
    trainer.attach(Validation([make_data(500, seed=1)], accuracy=Accuracy()), EMA(0.95), LossSpikes())
    trainer.attach(DeviceTransfer(DEVICE), [MixedPrecision("bf16")] if DEVICE == "cuda" else [])
    data: Iterable[Any] = DataLoader(TensorDataset(*make_data(1000, seed=0)), batch_size=BATCH, shuffle=True)
    return trainer, lambda engine: engine.run(data, max_epochs=epochs)


def main() -> None:
    trainer, run = build(seed=0)
    # Started again after an interruption, the run continues where it was.
    trainer.attach(ProgressBar(), CSVLogger("runs/log.csv"), Checkpoint("runs/first", every="1ep", resume=True))
    trainer.attach(Checkpoint("runs/best", monitor="val_accuracy", name="best"))
    run(trainer)
    print(f"validation accuracy: {trainer.state.metrics['val_accuracy']:.1%}")
    print(f"test accuracy: {trainer.test([make_data(500, seed=2)], weights='best')['accuracy']:.1%}")
    print(f"loss spikes: iterations {trainer[LossSpikes].found or 'none'}")


if __name__ == "__main__":
    main()
