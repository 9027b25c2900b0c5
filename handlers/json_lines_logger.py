"""Logs losses, metrics and learning rates to a JSON Lines file."""

from __future__ import annotations

import json
import math
import os
import time as clock

from signalfire import Interval

from ._common.scalars import Record
from ._common.text_logs import TextLogger

__all__ = ["JSONLinesLogger"]


class JSONLinesLogger(TextLogger):
    """Writes losses, scalar metrics and the learning rates of each step to a JSON Lines file.

    Each line is an object with the values that are new at that iteration::

        {"epoch": 1, "iteration": 10, "step": 10, "train/loss": 0.25, "lr": 0.1}
        {"epoch": 1, "iteration": 12, "step": 12, "val/accuracy": 0.75}

    ``step`` counts the optimizer steps of the first update. Names are the same as in TensorBoard. Values are written in full
    precision. JSON has no non-finite numbers, so they are written as the strings "NaN", "Infinity" and "-Infinity", which
    ``float`` accepts.

    A run that is stopped or killed at any point and resumes from a checkpoint produces the same file as an uninterrupted run,
    with no record lost, duplicated or partial. A new run first copies an existing file to ``log.1.jsonl``.

    Args:
        path: Path of the file; its folder is created if missing.
        every: Interval in iterations, such as "10it", for losses, learning rates and per-iteration metrics. All other new metric
            values are written with the iteration that measured them.
        time: Whether to add a ``time`` to each record, the time of writing in seconds since 1970.

    Raises:
        OSError: If a record cannot be written, for example on a full disk. The error names the handler; earlier records are
            kept.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from pathlib import Path
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> engine = Engine(update, model=model, seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = engine.attach(JSONLinesLogger(f"{folder}/log.jsonl", every="2it"))
        ...     _ = engine.run([(torch.ones(4, 1), torch.ones(4, 1))] * 2, max_epochs=2)
        ...     print(Path(f"{folder}/log.jsonl").read_text(), end="")
        {"epoch": 1, "iteration": 2, "step": 2, "train/loss": 0.25, "lr": 0.25}
        {"epoch": 2, "iteration": 4, "step": 4, "train/loss": 0.015625, "lr": 0.25}
    """

    other_names = {
        "every_n_steps": 'every="10it"',
        "log_every_n_steps": 'every="10it"',
        "save_dir": "the first argument, the path",
    }

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: str | Interval = "10it",
        time: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(path, every=every, time=time, name=name)

    def lines(self, record: Record) -> str:
        """The record as one JSON object."""
        place: dict[str, object] = {"epoch": record.epoch, "iteration": record.iteration, "step": record.step}
        if self.time:
            place["time"] = clock.time()
        return json.dumps(place | {tag: _number(value) for tag, value in record.values.items()}, allow_nan=False) + "\n"

    def iteration_of(self, line: str) -> int:
        """The iteration of a line, from its JSON object."""
        try:
            return int(json.loads(line)["iteration"])
        except (KeyError, TypeError) as error:
            raise ValueError(line) from error


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
