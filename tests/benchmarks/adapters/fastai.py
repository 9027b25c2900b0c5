"""fastai: a Learner with torch's optimizer; without its Recorder where nothing is to be recorded.

Its schedules are functions of the share of the training that is done. Early stopping needs the Recorder's smoothed loss. A
callback writes the rows. Its checkpoint of every epoch is kept: one that is replaced would be the best, and loaded at the end.
"""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastai.callback.core import Callback, CancelBatchException, TrainEvalCallback
from fastai.callback.schedule import ParamScheduler
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.learner import Learner, Recorder
from fastai.optimizer import OptimWrapper
from torch import Tensor

from .items import ACCUMULATE, ITEMS, LOG_EVERY, MAX_NORM, PATIENCE, Batches, Item, Run, choose, decay

PACKAGE = "fastai"


def make(item: Item) -> Run | None:
    return choose(item, empty=empty, plain=plain, full=full)


class Nothing(Callback):
    """The empty step: the rest of the batch is left out."""

    def before_batch(self) -> None:
        raise CancelBatchException


class Rows(Callback):
    def __init__(self, file: Any) -> None:
        self.writer = csv.writer(file)

    def after_batch(self) -> None:
        if self.train_iter % LOG_EVERY == 0:
            self.writer.writerow([self.train_iter, self.loss.item(), self.opt.hypers[-1]["lr"]])


def train(item: Item, batches: Any, epochs: int, callbacks: Any, **options: Any) -> list[Tensor]:
    model = item.model()
    rate = item.optimizer.keywords["lr"]  # type: ignore[attr-defined]
    learner = Learner(
        DataLoaders(batches, Batches([])),
        model,
        item.loss,
        opt_func=partial(OptimWrapper, opt=item.optimizer),
        lr=rate,
        cbs=[TrainEvalCallback, *callbacks],
        default_cbs=False,
        train_bn=False,
        **options,
    )
    learner.logger = lambda row: None
    learner.fit(epochs)
    return list(model.parameters())


def empty(iterations: int) -> list[Tensor]:
    train(ITEMS["empty"], Batches([(0, 0)] * iterations), 1, [Nothing])
    return []


def plain(item: Item) -> Run:
    return lambda iterations: train(item, *item.data(iterations), [])


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        rate = item.optimizer.keywords["lr"]  # type: ignore[attr-defined]
        with TemporaryDirectory() as folder, open(Path(folder, "log.csv"), "w", newline="") as log:
            callbacks = [
                Recorder,
                GradientAccumulation(ACCUMULATE * 16),  # counted in samples
                GradientClip(MAX_NORM),
                ParamScheduler({"lr": lambda done: rate * decay(round(done * iterations) // ACCUMULATE)}),
                EarlyStoppingCallback("train_loss", patience=PATIENCE),
                SaveModelCallback("train_loss", fname="last", every_epoch=True, with_opt=True),
                Rows(log),
            ]
            return train(item, *item.data(iterations), callbacks, path=Path(folder))

    return run
