"""PyTorch-Ignite: a step function of one's own, which accumulates and clips; the other features are its handlers.

It has no CSV logger: a function on an event writes the rows.
"""

from __future__ import annotations

import csv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping
from ignite.handlers.param_scheduler import LRScheduler
from ignite.metrics import Average
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from .items import ACCUMULATE, LOG_EVERY, MAX_NORM, PATIENCE, Batches, Item, Run, choose, decay

PACKAGE = "pytorch-ignite"


def make(item: Item) -> Run | None:
    return choose(item, empty=empty, plain=plain, full=full)


def nothing(engine: Engine, batch: Any) -> None:
    """The empty step."""


def empty(iterations: int) -> list[Tensor]:
    Engine(nothing).run(Batches(range(iterations)), max_epochs=1)
    return []


def plain(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        model = item.model()
        optimizer = item.optimizer(model.parameters())

        def step(engine: Engine, batch: Any) -> None:
            x, y = batch
            loss = item.loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        batches, epochs = item.data(iterations)
        Engine(step).run(batches, max_epochs=epochs)
        return list(model.parameters())

    return run


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        model = item.model()
        parameters = list(model.parameters())
        optimizer = item.optimizer(parameters)
        schedule = LRScheduler(LambdaLR(optimizer, decay))

        def step(engine: Engine, batch: Any) -> Tensor:
            x, y = batch
            loss = item.loss(model(x), y)
            (loss / ACCUMULATE).backward()
            if engine.state.iteration % ACCUMULATE == 0:
                torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        trainer = Engine(step)
        batches, epochs = item.data(iterations)
        Average().attach(trainer, "loss")
        trainer.add_event_handler(Events.ITERATION_STARTED(every=ACCUMULATE), schedule)
        stopping = EarlyStopping(PATIENCE, lambda engine: -engine.state.metrics["loss"], trainer)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, stopping)
        with TemporaryDirectory() as folder, open(Path(folder, "log.csv"), "w", newline="") as log:
            objects = {"trainer": trainer, "model": model, "optimizer": optimizer, "schedule": schedule}
            saver = DiskSaver(folder, require_empty=False)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(objects, saver, n_saved=1))
            rows = csv.writer(log)

            @trainer.on(Events.ITERATION_COMPLETED(every=LOG_EVERY))
            def write(engine: Engine) -> None:
                rows.writerow([engine.state.iteration, engine.state.output.item(), optimizer.param_groups[0]["lr"]])

            trainer.run(batches, max_epochs=epochs)
        return list(parameters)

    return run
