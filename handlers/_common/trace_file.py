"""The file of a trace as it is written: appended, cut to a checkpoint's place, and continued in parts of a limited size."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from signalfire.traces.files import Record, file_of_rank, part_of, parts_of

from .line_file import LineFile

__all__ = ["Place", "TraceWriter"]


class Place(NamedTuple):
    """Where a run is in its trace: the iteration of the last record, and whether that is of the end of its epoch."""

    iteration: int
    ends_epoch: bool

    @classmethod
    def of(cls, record: Record) -> Place:
        return cls(record.iteration, record.event == "EPOCH_COMPLETED")


class TraceWriter:
    """Writes the trace of one process.

    Args:
        path: The first part of rank 0.
        rank: The rank of the process.
        header: The first line of each part.
        part_size: Bytes after which a part ends.

    Attributes:
        path: The first part.
        part: The part that is written to, counted from 1.
    """

    def __init__(self, path: Path, rank: int, header: str, part_size: int) -> None:
        self.path, self.header, self.part_size = file_of_rank(path, rank), header, part_size
        self.part = 1
        self._root, self._rank = path, rank
        self._file: LineFile | None = None

    @property
    def length(self) -> int:
        """Bytes of the part that is written to."""
        return 0 if self._file is None else self._file.length

    @property
    def digest(self) -> str:
        """The sha256 of the part that is written to."""
        return "" if self._file is None else self._file.digest

    @property
    def in_place(self) -> bool:
        """Whether the written file is the one at the path."""
        return self._file is None or self._file.is_at(part_of(self.path, self.part))

    def begin(self) -> None:
        """Start a new file; files of a different trace are kept under other names."""
        self.part = 1
        self._back_up()
        self._remove_after(1)
        self._file = LineFile.replace(self.path, self.header)

    def retire(self) -> None:
        """Keep the files under other names, without starting new ones."""
        self._back_up()
        self._remove_after(0)

    def resume(self, state: Mapping[str, Any]) -> bool:
        """Cut the file to the position in a state; returns False for the file of a different run, which is left unchanged."""
        if not set(range(1, state["part"])) <= set(parts_of(self.path)):
            return False
        file = LineFile.reopen(part_of(self.path, state["part"]), state["length"], state["sha256"])
        if file is None:
            return False
        self._continue(file, state["part"])
        return True

    def resume_at(self, place: Place) -> bool:
        """Cut the file behind the last record that is not after a place; returns False if there is none."""
        parts = parts_of(self.path)
        if parts != list(range(1, len(parts) + 1)):
            return False
        for part in reversed(parts):
            path = part_of(self.path, part)
            if (length := _length_until(path, place)) is not None:
                self._continue(LineFile.cut(path, length), part)
                return True
        return False

    def _continue(self, file: LineFile, part: int) -> None:
        self._file, self.part = file, part
        self._remove_after(part)

    def append(self, lines: str) -> None:
        """Append lines to the file, in one piece; this may begin a new part."""
        assert self._file is not None
        if self._file.length > self.part_size:
            file = LineFile.create(part_of(self.path, self.part + 1), self.header)
            self._file.close()
            self._file, self.part = file, self.part + 1
        self._file.append(lines)

    def sync(self) -> None:
        """Flush the file to disk."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            with suppress(OSError) if self._file.failed else nullcontext():
                self._file.close()

    def _back_up(self) -> None:
        """Copy the parts to the names of a separate trace: ``trace.1.jsonl``, ``trace.1.part2.jsonl``."""
        if not (parts := parts_of(self.path)):
            return
        names = (self._root.with_name(f"{self._root.stem}.{n}{self._root.suffix}") for n in itertools.count(1))
        kept = next(one for name in names if not parts_of(one := file_of_rank(name, self._rank)))
        for part in parts:
            shutil.copy2(part_of(self.path, part), part_of(kept, part))

    def _remove_after(self, part: int) -> None:
        """Remove later parts, the last one first: a kill leaves no gap."""
        for later in reversed([one for one in parts_of(self.path) if one > part]):
            part_of(self.path, later).unlink()


def _length_until(path: Path, place: Place) -> int | None:
    """The bytes up to the last record that is not after a place; None if there is no such record."""
    length, read = None, 0
    with open(path, "rb") as file, suppress(ValueError, KeyError, TypeError):  # from a damaged line on
        for line in file:
            values = json.loads(line) if line.endswith(b"\n") else {}
            read += len(line)
            if "event" in values and Place.of(Record.of_line(values)) <= place:
                length = read
    return length
