"""The plain PyTorch loop: the limit."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from .items import ACCUMULATE, LOG_EVERY, MAX_NORM, PATIENCE, Batches, Item, Run, choose, decay

PACKAGE = "torch"


def make(item: Item) -> Run | None:
    return choose(item, empty=empty, plain=plain, full=full)


def nothing(batch: int) -> None:
    """The empty step."""


def empty(iterations: int) -> list[Tensor]:
    for batch in Batches(range(iterations)):
        nothing(batch)
    return []


def plain(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        model = item.model()
        optimizer = item.optimizer(model.parameters())
        batches, epochs = item.data(iterations)
        for _ in range(epochs):
            for x, y in batches:
                loss = item.loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    return run


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        model = item.model()
        parameters = list(model.parameters())
        optimizer = item.optimizer(parameters)
        scheduler = LambdaLR(optimizer, decay)
        batches, epochs = item.data(iterations)
        best, waited, iteration = math.inf, 0, 0
        with TemporaryDirectory() as folder, open(Path(folder, "log.csv"), "w", newline="") as log:
            rows = csv.writer(log)
            rows.writerow(["iteration", "loss", "learning_rate"])
            for epoch in range(epochs):
                losses = []
                for x, y in batches:
                    iteration += 1
                    loss = item.loss(model(x), y)
                    (loss / ACCUMULATE).backward()
                    losses.append(loss.detach())
                    if iteration % LOG_EVERY == 0:
                        rows.writerow([iteration, loss.item(), scheduler.get_last_lr()[0]])
                    if iteration % ACCUMULATE == 0:  # a whole number of windows makes an epoch
                        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
                        optimizer.step()
                        optimizer.zero_grad()
                        scheduler.step()
                running = torch.stack(losses).mean().item()
                best, waited = (running, 0) if running < best else (best, waited + 1)
                objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                state = {name: one.state_dict() for name, one in objects.items()} | {"epoch": epoch, "best": best}
                torch.save(state, Path(folder, "new.pt"))
                os.replace(Path(folder, "new.pt"), Path(folder, "last.pt"))
                if waited >= PATIENCE:
                    break
        return list(parameters)

    return run
