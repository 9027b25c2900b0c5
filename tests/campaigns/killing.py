"""What the campaigns that kill have in common: the data, the handlers that have a state, what is kept, and the options."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset

from signalfire import Engine, Handler, Update
from signalfire.distributed.sharded import read_shards
from signalfire.handlers import (
    EMA,
    Accuracy,
    Average,
    Checkpoint,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    Validation,
)
from tests.kit import digest

__all__ = [
    "Augmented",
    "attach_company",
    "different_parts",
    "ended",
    "engine_of",
    "environment",
    "kept",
    "options_of",
    "show",
    "wait",
    "write",
]

Batch = tuple[Tensor, Tensor]


def make_samples(count: int, seed: int) -> Batch:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


class Augmented(Dataset[Batch]):
    """Samples with noise from each of the global generators."""

    def __init__(self, count: int) -> None:
        self.x, self.y = make_samples(count, seed=0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        noise = torch.randn(6) + float(np.random.randn()) + random.gauss(0, 1)
        return self.x[index] + 0.3 * noise, self.y[index]


def engine_of(model: nn.Module) -> Engine:
    update = Update.supervised(nn.functional.cross_entropy, partial(torch.optim.Adam, lr=0.02))
    return Engine(update, model=model, seed=0)


def attach_company(engine: Engine, *logs: Handler, window: int, held_out: int) -> History:
    """Attach the handlers that have a state, but for those that write checkpoints.

    Args:
        logs: those that write logs.
        window: how many batches are accumulated.
        held_out: how many samples are for the validation.
    """
    evaluator = Engine(Update.supervised(nn.functional.cross_entropy), model=engine.model)
    evaluator.attach(Metrics(loss=Average(), accuracy=Accuracy()))
    history = History()
    engine.attach(
        GradientAccumulation(window),
        GradientClipping(max_norm=0.5),
        LRScheduling(partial(OneCycleLR, max_lr=0.1)),
        EMA(0.9),
        Metrics(train_loss=Average()),
        Validation(evaluator, list(zip(*(all_of.split(8) for all_of in make_samples(held_out, seed=1)), strict=True))),
        EarlyStopping("loss", patience=50),
        *logs,
        history,
    )
    return history


def kept(engine: Engine) -> list[list[Any]]:
    """Of each checkpoint that is kept: whose, where in the run, with which value, and what is in it."""
    found = []
    for handler in engine.handlers.values():
        if isinstance(handler, Checkpoint):
            for name, value in handler.kept:
                state = Checkpoint.load(handler.folder / name)
                manifest = state.pop("origin")["manifest"]
                state = dict(read_shards(state, parameters=(), device=torch.device("cpu")))
                # How often an event was emitted: a process that resumed did not see the save from which it resumed.
                del state["engine"]["fired"]
                found.append([handler.name, manifest["epoch"], manifest["iteration"], value, digest(state)])
    return found


def different_parts(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The parts of the fingerprint that differ."""
    return [part for part, value in expected["parts"].items() if found["parts"].get(part) != value]


def wait(process: int) -> int:
    """The status with which a process ends; that of one which is killed is negative."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def ended(process: int) -> int | None:
    """The status with which a process has ended, or None."""
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


# ---- options and results ----------------------------------------------------------------------------------------------


def options_of(doc: str | None, result: Path) -> argparse.ArgumentParser:
    """The options that each has, apart from how many kills and minutes it takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the runs write; that of temporary files otherwise"
    )
    parser.add_argument(
        "--json", default=str(result), help=f"where the result is written ({result}); - for stdout alone"
    )
    parser.add_argument("--last", action="store_true", help="print the last result")
    return parser


def environment() -> dict[str, Any]:
    return {"python": platform.python_version(), "torch": str(torch.__version__), "cores": os.cpu_count()}


def write(found: Mapping[str, Any], path: str) -> None:
    if path != "-":
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


def show(found: Mapping[str, Any], path: str, summary: Callable[[Mapping[str, Any]], str]) -> None:
    """Write the result, and print it for people; to stdout alone it is JSON."""
    write(found, path)
    if path == "-":
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        print(summary(found))
