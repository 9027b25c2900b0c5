"""Accelerate: the loop is the user's, and so are running loss and early stopping; it wraps model, optimizer, schedule and data.

It wraps DataLoaders only: what it is given as ``Batches`` it leaves as it is, and the empty step is in the user's loop alone.
Its trackers are for services; a tracker of one's own writes the CSV rows, as its documentation shows.
Its optimizer looks for the package lomo_optim twice a step: where it is not there, in every folder of the import path.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from .items import ACCUMULATE, LOG_EVERY, MAX_NORM, PATIENCE, Batches, Item, Run, choose, decay

PACKAGE = "accelerate"


def make(item: Item) -> Run | None:
    return choose(item, empty=empty, plain=plain, full=full)


class Rows(GeneralTracker):
    name = "rows"
    requires_logging_directory = False

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.writer = csv.writer(file)

    @property
    def tracker(self) -> Any:
        return self.writer

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.writer.writerow([step, *values.values()])


def nothing(batch: Any) -> None:
    """The empty step."""


def empty(iterations: int) -> list[Tensor]:
    for batch in Accelerator(cpu=True).prepare(Batches(range(iterations))):
        nothing(batch)
    return []


def plain(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        accelerator = Accelerator(cpu=True)
        batches, epochs = item.data(iterations)
        model = item.model()
        optimizer = item.optimizer(model.parameters())
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        for _ in range(epochs):
            for x, y in batches:
                loss = item.loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    return run


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        batches, epochs = item.data(iterations)
        model = item.model()
        optimizer = item.optimizer(model.parameters())
        scheduler = LambdaLR(optimizer, decay)
        best, waited, iteration = math.inf, 0, 0
        with TemporaryDirectory() as folder, open(Path(folder, "log.csv"), "w", newline="") as log:
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, log_with=Rows(log))
            accelerator.init_trackers("benchmark")
            model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
            for _ in range(epochs):
                losses = []
                for x, y in batches:
                    iteration += 1
                    with accelerator.accumulate(model):
                        loss = item.loss(model(x), y)
                        accelerator.backward(loss)
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    losses.append(loss.detach())
                    if iteration % LOG_EVERY == 0:
                        values = {"loss": loss.item(), "learning_rate": scheduler.get_last_lr()[0]}
                        accelerator.log(values, step=iteration)
                running = torch.stack(losses).mean().item()
                best, waited = (running, 0) if running < best else (best, waited + 1)
                accelerator.save_state(str(Path(folder, "last")))
                if waited >= PATIENCE:
                    break
        return list(model.parameters())

    return run
