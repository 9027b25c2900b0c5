"""Logs losses, metrics and learning rates to a CSV file."""

from __future__ import annotations

import csv
import io
import os
import time as clock
from functools import cache

from signalfire import Interval

from ._common.scalars import Record
from ._common.text_logs import TextLogger

__all__ = ["CSVLogger"]


class CSVLogger(TextLogger):
    """Writes losses, scalar metrics and the learning rates of each step to a CSV file.

    The file is in long format, with one row per value and the columns ``epoch,iteration,step,name,value``. ``step`` is the
    number of optimizer steps that the first update had taken when the value was measured: in one iteration, a gradient norm is
    measured before the step and the loss is recorded after it. Rows are only appended. Names are the same as in TensorBoard:
    ``train/loss``, ``lr``, ``val/accuracy``. Values are written in full precision, or as ``nan``, ``inf`` and ``-inf``. To get
    one column per name with pandas::

        pandas.read_csv("log.csv").pivot(index="iteration", columns="name", values="value")

    A run that is stopped or killed at any point and resumes from a checkpoint produces the same file as an uninterrupted run,
    with no row lost, duplicated or partial. A new run first copies an existing file to ``log.1.csv``.

    Args:
        path: Path of the file; its folder is created if missing.
        every: Interval in iterations, such as "10it", for losses, learning rates and per-iteration metrics. All other new
            metric values are written with the iteration in which they were measured.
        time: Whether to add a column ``time`` before ``name``, with the time of writing in seconds since 1970.

    Raises:
        OSError: If a row cannot be written, for example on a full disk. The error names the handler; earlier rows are kept.

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
        ...     _ = engine.attach(CSVLogger(f"{folder}/log.csv", every="2it"))
        ...     _ = engine.run([(torch.ones(4, 1), torch.ones(4, 1))] * 2, max_epochs=1)
        ...     print(Path(f"{folder}/log.csv").read_text(), end="")
        epoch,iteration,step,name,value
        1,2,2,train/loss,0.25
        1,2,2,lr,0.25
    """

    other_names = {
        "save_dir": "the first argument, the path",
        "every_n_steps": 'every="10it"',
        "log_every_n_steps": 'every="10it"',
        "flush_logs_every_n_steps": 'every="10it"',
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

    @property
    def header(self) -> str:
        """The names of the columns."""
        return f"epoch,iteration,step,{'time,' if self.time else ''}name,value\n"

    def lines(self, record: Record) -> str:
        """One row per value."""
        time = f"{clock.time()}," if self.time else ""
        place = f"{record.epoch},{record.iteration},{record.step},{time}"
        return "".join([f"{place}{_cell(name)},{value!r}\n" for name, value in record.values.items()])

    def iteration_of(self, line: str) -> int:
        """The iteration of a row, from its second column."""
        cells = line.split(",")
        if len(cells) < self.header.count(",") + 1:
            raise ValueError(line)
        return int(cells[1])


@cache
def _cell(name: str) -> str:
    """A name as a CSV cell, quoted if necessary."""
    row = io.StringIO()
    csv.writer(row, lineterminator="\n").writerow([name])
    return row.getvalue()[:-1]
