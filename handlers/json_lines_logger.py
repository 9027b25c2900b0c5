"""Losses, metrics and learning rates as JSON, an object a line."""

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
    """Writes losses, metrics that are one number, and the learning rates that were used, into a file of JSON lines.

    A record is an object in a line of its own, with the values that are new at its place::

        {"epoch": 1, "iteration": 10, "step": 10, "loss": 0.25, "learning_rate": 0.1}
        {"epoch": 1, "iteration": 12, "step": 12, "metrics/accuracy": 0.75}

    where step counts the optimizer steps (of the first update). The names are TensorBoard's. Values are written with all their
    digits. JSON has no other numbers: they are the strings "NaN", "Infinity" and "-Infinity", which every parser accepts and
    ``float`` understands.

    A run that is stopped or killed at any moment and goes on from a checkpoint ends with the file of a run that was never
    stopped: none of its records is lost, doubled or torn. A run that begins anew, with a file of this name in place, sets that
    file aside first, as ``log.1.jsonl``.

    Args:
        path: the file; its folder is made if it is not there.
        every: the interval of losses and learning rates, in iterations, such as "10it"; new values of metrics are written
            after every evaluation and every epoch.
        time: whether records have a ``time``: when they were written, in seconds since 1970.

    Errors:
        What cannot be written, for example on a full disk, is an OSError that names the handler; the records before it stay.

    Example:
        >>> JSONLinesLogger("runs/digits/log.jsonl", every="50it").name
        'json_lines_logger'
    """

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
        """One object."""
        place: dict[str, object] = {"epoch": record.epoch, "iteration": record.iteration, "step": record.step}
        if self.time:
            place["time"] = clock.time()
        return json.dumps(place | {tag: _number(value) for tag, value in record.values.items()}, allow_nan=False) + "\n"

    def iteration_of(self, line: str) -> int:
        """What the object says."""
        try:
            return int(json.loads(line)["iteration"])
        except (KeyError, TypeError) as error:
            raise ValueError(line) from error


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
