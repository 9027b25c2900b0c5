"""The file of a trace as it is written: appended, cut to a checkpoint's place, and continued in parts of a limited size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from signalfire.traces.files import Record, part_of

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
        path: The first part.
        header: The first line of each part.
        part_size: Bytes after which a part ends.

    Attributes:
        part: The part that is written to, counted from 1.
    """

    def __init__(self, path: Path, header: str, part_size: int) -> None:
        self.path, self.header, self.part_size = path, header, part_size
        self.part = 1
        self._file: LineFile | None = None

    @property
    def length(self) -> int:
        """Bytes of the part that is written to."""
        return 0 if self._file is None else self._file.length

    @property
    def digest(self) -> str:
        """The sha256 of the part that is written to."""
        return "" if self._file is None else self._file.digest

    def begin(self) -> None:
        """Begin anew; files of another trace are kept under other names."""
        self.part = 1
        for path in self._parts():
            LineFile.back_up(path)
            path.unlink()
        self._file = LineFile.create(self.path, self.header)

    def resume(self, state: Mapping[str, Any]) -> bool:
        """Cut the file to what a state has; returns False if it is not the file of that run, which is left as it is."""
        file = LineFile.reopen(part_of(self.path, state["part"]), state["length"], state["sha256"])
        if file is None:
            return False
        self._continue(file, state["part"])
        return True

    def resume_at(self, place: Place) -> bool:
        """Cut the file behind the last record that is not after a place; returns False if there is none."""
        for part, path in reversed(list(enumerate(self._parts(), 1))):
            if (length := _length_until(path, place)) is not None:
                self._continue(LineFile.cut(path, length), part)
                return True
        return False

    def _continue(self, file: LineFile, part: int) -> None:
        self._file, self.part = file, part
        for path in self._parts()[part:]:
            path.unlink()

    def append(self, lines: str) -> None:
        """Append lines to the file, in one piece."""
        assert self._file is not None
        if self._file.length > self.part_size:
            self._file.close()
            self.part += 1
            self._file = LineFile.create(part_of(self.path, self.part), self.header)
        self._file.append(lines)

    def sync(self) -> None:
        """Flush what was written to disk."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            self._file.close()

    def _parts(self) -> list[Path]:
        """The parts that exist."""
        found: list[Path] = []
        while (path := part_of(self.path, len(found) + 1)).exists():
            found.append(path)
        return found


def _length_until(path: Path, place: Place) -> int | None:
    """The bytes up to the last record that is not after a place; None if there is no such record."""
    length, read = None, 0
    with open(path, "rb") as file:
        for line in file:
            values = json.loads(line) if line.endswith(b"\n") else {}
            read += len(line)
            if "event" in values and Place.of(Record.of_line(values)) <= place:
                length = read
    return length
