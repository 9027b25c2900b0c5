"""skorch: a NeuralNet without its default callbacks.

It has no accumulation: as its documentation says, `train_step` is overridden, and the schedule moves there, too, as its own would
move with every batch. It keeps every batch's loss in its history; a callback writes the rows.
"""

from __future__ import annotations

import csv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback, Checkpoint, EarlyStopping, PassthroughScoring
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from .items import ACCUMULATE, LOG_EVERY, MAX_NORM, PATIENCE, Item, Run, choose, decay

PACKAGE = "skorch"


def make(item: Item) -> Run | None:
    return choose(item, plain=plain, full=full)


class Criterion(nn.Module):
    def __init__(self, item: Item) -> None:
        super().__init__()
        self.item = item

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.item.loss(output, target)


class Net(NeuralNet):
    @property
    def _default_callbacks(self) -> list[Any]:
        return []


class FullNet(Net):
    def on_train_begin(self, net: Any, **kwargs: Any) -> None:
        super().on_train_begin(net, **kwargs)
        self.seen, self.scheduler = 0, LambdaLR(self.optimizer_, decay)

    def train_step(self, batch: Any, **parameters: Any) -> Any:
        self.seen += 1
        step = self.train_step_single(batch, **parameters)
        if self.seen % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(self.module_.parameters(), MAX_NORM)
            self.optimizer_.step()
            self.optimizer_.zero_grad()
            self.scheduler.step()
        return step

    def get_loss(self, *arguments: Any, **options: Any) -> Tensor:
        loss: Tensor = super().get_loss(*arguments, **options)
        return loss / ACCUMULATE


class Rows(Callback):
    def __init__(self, file: Any) -> None:
        self.file = file

    def on_train_begin(self, net: Any, **kwargs: Any) -> None:
        self.writer = csv.writer(self.file)

    def on_batch_end(self, net: Any, **kwargs: Any) -> None:
        if net.seen % LOG_EVERY == 0:
            rate = net.optimizer_.param_groups[0]["lr"]
            self.writer.writerow([net.seen, net.history[-1, "batches", -1, "train_loss"], rate])


def train(kind: type[Net], item: Item, iterations: int, callbacks: list[Any]) -> list[Tensor]:
    batches, epochs = item.data(iterations)
    model = item.model()
    net = kind(
        model,
        Criterion(item),
        item.optimizer,
        lr=item.optimizer.keywords["lr"],  # type: ignore[attr-defined]
        max_epochs=epochs,
        iterator_train=lambda dataset, **options: batches,
        train_split=None,
        callbacks=callbacks,
        verbose=0,
    )
    net.fit(torch.utils.data.TensorDataset(torch.zeros(1)), None)
    return list(model.parameters())


def plain(item: Item) -> Run:
    return lambda iterations: train(Net, item, iterations, [])


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        with TemporaryDirectory() as folder, open(Path(folder, "log.csv"), "w", newline="") as log:
            callbacks = [
                Rows(log),
                ("running", PassthroughScoring("train_loss", on_train=True)),
                EarlyStopping("train_loss", patience=PATIENCE, threshold=0.0, sink=lambda text: None),
                Checkpoint(monitor=None, dirname=folder, sink=lambda text: None),
            ]
            return train(FullNet, item, iterations, callbacks)

    return run
