"""Losses, metrics and learning rates as a table of comma-separated values."""

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
    """Writes losses, metrics that are one number, and the learning rates that were used, into a CSV file.

    The file is in the long form: a row for each value, with the columns ``epoch,iteration,step,name,value``, where step counts
    the optimizer steps (of the first update). So there may be new names at any time, and rows are only ever added at the end.
    The names are TensorBoard's: ``loss``, ``learning_rate``, ``metrics/accuracy``. Values are written with all their digits,
    others as ``nan``, ``inf`` and ``-inf``. One column for each name, with pandas::

        pandas.read_csv("log.csv").pivot(index="iteration", columns="name", values="value")

    A run that is stopped or killed at any moment and goes on from a checkpoint ends with the file of a run that was never
    stopped: none of its rows is lost, doubled or torn. A run that begins anew, with a file of this name in place, sets that
    file aside first, as ``log.1.csv``.

    Args:
        path: the file; its folder is made if it is not there.
        every: the interval of losses and learning rates, in iterations, such as "10it"; new values of metrics are written
            after every evaluation and every epoch.
        time: whether there is a column ``time`` in front of the name: when the row was written, in seconds since 1970.

    Errors:
        What cannot be written, for example on a full disk, is an OSError that names the handler; the rows before it stay.

    Example:
        >>> CSVLogger("runs/digits/log.csv", every="50it").name
        'csv_logger'
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
        self.header = f"epoch,iteration,step,{'time,' if self.time else ''}name,value\n"

    def lines(self, record: Record) -> str:
        """A row for each value."""
        time = f"{clock.time()}," if self.time else ""
        place = f"{record.epoch},{record.iteration},{record.step},{time}"
        return "".join([f"{place}{_cell(name)},{value!r}\n" for name, value in record.values.items()])

    def iteration_of(self, line: str) -> int:
        """The second column."""
        cells = line.split(",")
        if len(cells) < self.header.count(",") + 1:
            raise ValueError(line)
        return int(cells[1])


@cache
def _cell(name: str) -> str:
    """A name as CSV has it, in quotes where it needs them."""
    row = io.StringIO()
    csv.writer(row, lineterminator="\n").writerow([name])
    return row.getvalue()[:-1]
