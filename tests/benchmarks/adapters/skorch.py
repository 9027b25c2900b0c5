"""skorch: a NeuralNet, of whose default callbacks only the one is left that keeps the mean loss, where that is wanted.

It has no accumulation: as its documentation says, `train_step` is overridden, and the schedule moves there, too, as its own would
move with every batch. It keeps every batch's loss in its history; a callback writes the rows.
"""

from __future__ import annotations

import csv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback, Checkpoint, EarlyStopping
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from .items import ACCUMULATE, ITEMS, LOG_EVERY, MAX_NORM, PATIENCE, Batches, Item, Run, choose, decay

PACKAGE = "skorch"


def make(item: Item) -> Run | None:
    return choose(item, empty=empty, plain=plain, full=full)


class Criterion(nn.Module):
    def __init__(self, item: Item) -> None:
        super().__init__()
        self.item = item

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.item.loss(output, target)


class Nothing(NeuralNet):
    """The empty step. The loss of every batch is written into the history."""

    step: ClassVar[dict[str, Tensor]] = {"loss": torch.zeros(()), "y_pred": torch.zeros(())}

    def train_step(self, batch: Any, **parameters: Any) -> Any:
        return self.step


class FullNet(NeuralNet):
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
            self.writer.writerow([net.seen, net.history[-1, "batches", -1, "train_loss"] * ACCUMULATE, rate])


def train(kind: type[NeuralNet], item: Item, batches: Any, epochs: int, callbacks: Any, **options: Any) -> list[Tensor]:
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
        **options,
    )
    net.fit(torch.utils.data.TensorDataset(torch.zeros(1)), None)
    return list(model.parameters())


def empty(iterations: int) -> list[Tensor]:
    batch = ((0,), (0,))  # the length of its parts is taken
    train(Nothing, ITEMS["empty"], Batches([batch] * iterations), 1, "disable")
    return []


def plain(item: Item) -> Run:
    return lambda iterations: train(NeuralNet, item, *item.data(iterations), "disable")


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        with TemporaryDirectory() as folder, open(Path(folder, "log.csv"), "w", newline="") as log:
            callbacks = [
                Rows(log),
                EarlyStopping("train_loss", patience=PATIENCE, threshold=0.0, sink=lambda text: None),
                Checkpoint(monitor=None, dirname=folder, sink=lambda text: None),
            ]
            unwanted: dict[str, Any] = {
                f"callbacks__{name}": None for name in ("epoch_timer", "valid_loss", "print_log")
            }
            return train(FullNet, item, *item.data(iterations), callbacks, **unwanted)

    return run
