"""Signalfire: every feature is a handler.

Its checkpoints are not synced to the disk, as those of the others are not.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from signalfire import Engine, Update
from signalfire.handlers import (
    Average,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    Metrics,
)

from .items import ACCUMULATE, LOG_EVERY, MAX_NORM, PATIENCE, Batches, Item, Run, choose, decay

PACKAGE = "signalfire"


def make(item: Item) -> Run | None:
    return choose(item, empty=empty, plain=plain, full=full)


def nothing(engine: Engine, batch: Any) -> None:
    """The empty step."""


def empty(iterations: int) -> list[Tensor]:
    Engine(Update.from_function(nothing)).run(Batches(range(iterations)))
    return []


def plain(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        model = item.model()
        engine = Engine(Update.supervised(item.loss, item.optimizer), model=model)
        batches, epochs = item.data(iterations)
        engine.run(batches, max_epochs=epochs)
        return list(model.parameters())

    return run


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        model = item.model()
        engine = Engine(Update.supervised(item.loss, item.optimizer), model=model)
        batches, epochs = item.data(iterations)
        with TemporaryDirectory() as folder:
            engine.attach(
                GradientAccumulation(ACCUMULATE),
                GradientClipping(max_norm=MAX_NORM),
                LRScheduling(partial(LambdaLR, lr_lambda=decay)),
                Metrics(loss=Average()),
                EarlyStopping("loss", patience=PATIENCE),
                Checkpoint(folder, keep=1, sync_files=False),
                CSVLogger(Path(folder, "log.csv"), every=f"{LOG_EVERY}it"),
            )
            engine.run(batches, max_epochs=epochs)
        return list(model.parameters())

    return run
