"""Traces on disk: a file of JSON lines for each process, in parts of a limited size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "FORMAT",
    "Record",
    "TraceFile",
    "file_of_rank",
    "header_line",
    "part_of",
    "parts_of",
    "ranks_of",
    "read_traces",
]

FORMAT = 1

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class Record(NamedTuple):
    """What a run consisted of at one event.

    Attributes:
        iteration: The iteration; 0 before the first.
        event: The name of the event.
        update: The name of the update; None at events of the whole iteration.
        shard: The shard, at the events of one; None without shards.
        occurrence: Which occurrence of this event in the iteration it is, from 1, for this update and shard.
        digests: 16 hexadecimal digits for each thing, such as "parameters".
        numbers: The loss and norms, as far as they were measured.
    """

    iteration: int
    event: str
    update: str | None
    shard: int | None
    occurrence: int
    digests: Mapping[str, str]
    numbers: Mapping[str, float]

    @property
    def key(self) -> tuple[int, str, str | None, int | None, int]:
        """What the same record of another run has, too."""
        return self.iteration, self.event, self.update, self.shard, self.occurrence

    def line(self) -> str:
        """The line of a file."""
        values: dict[str, Any] = {"iteration": self.iteration, "event": self.event}
        for name, value, usual in (
            ("update", self.update, None),
            ("shard", self.shard, None),
            ("occurrence", self.occurrence, 1),
        ):
            if value != usual:
                values[name] = value
        values |= {"digests": self.digests, "numbers": self.numbers}
        return _ENCODE(values) + "\n"

    @classmethod
    def of_line(cls, values: Mapping[str, Any]) -> Record:
        """The record of a line that was decoded."""
        optional = values.get("update"), values.get("shard"), values.get("occurrence", 1)
        return cls(values["iteration"], values["event"], *optional, values["digests"], values.get("numbers", {}))


def header_line(environment: Mapping[str, Any]) -> str:
    """The first line of each part: in what environment the records after it were made."""
    return _ENCODE({"format": FORMAT, "environment": environment}) + "\n"


def file_of_rank(path: Path, rank: int) -> Path:
    """The file of a rank: that of rank 0 has the given name."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def part_of(path: Path, part: int) -> Path:
    """A part of a file, counted from 1."""
    return path if part == 1 else path.with_name(f"{path.stem}.part{part}{path.suffix}")


def parts_of(path: Path) -> list[int]:
    """The parts of a file that exist, in their order."""
    return [1] * path.exists() + _numbers(path, "part")


def ranks_of(path: Path) -> list[int]:
    """The ranks of which there is a file, or a part of one, besides rank 0."""
    whole = path.with_name(f"{path.stem}.rank")
    parts = re.compile(re.escape(whole.name) + r"([1-9]\d*)\.part\d+" + re.escape(path.suffix))
    of_parts = {int(found[1]) for one in _listing(path) if (found := parts.fullmatch(one))}
    return sorted({*_numbers(path, "rank"), *of_parts})


def _numbers(path: Path, word: str) -> list[int]:
    pattern = re.compile(re.escape(f"{path.stem}.{word}") + r"([1-9]\d*)" + re.escape(path.suffix))
    return sorted(int(found[1]) for one in _listing(path) if (found := pattern.fullmatch(one)))


def _listing(path: Path) -> list[str]:
    return [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []


class TraceFile:
    """The trace of one process.

    Args:
        path: Its first part.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: For a file that is no trace, or one of a later version.

    Attributes:
        environments: Those in which it was made, without repetitions; a run that resumes elsewhere adds one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            raise ValueError(
                f"{str(path)!r} is a folder; pass the trace file inside it, such as {str(path / 'trace.jsonl')!r}"
            )
        self.environments: list[dict[str, Any]] = []
        if next(self._lines(), None) is None:
            raise ValueError(f"{str(path)!r} is not a trace, because it has no complete line")

    @property
    def environment(self) -> dict[str, Any]:
        """The last environment; empty if no line has one."""
        return self.environments[-1] if self.environments else {}

    def records(self) -> Iterator[Record]:
        """The records in the order of writing; a line that a killed process has not finished is left out.

        Raises:
            FileNotFoundError: If a part is missing between others.
            ValueError: For a line that is none of a trace.
        """
        for values in self._lines():
            if "event" in values:
                yield Record.of_line(values)

    def _lines(self) -> Iterator[dict[str, Any]]:
        last = max(parts_of(self.path), default=1)
        for part in range(1, last + 1):
            path = part_of(self.path, part)
            if not path.exists():
                raise FileNotFoundError(f"there is no file {str(path)!r}" + f", but part {last} exists" * (last > 1))
            with open(path, encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith("\n"):
                        yield self._decoded(path, number, line)

    def _decoded(self, path: Path, number: int, line: str) -> dict[str, Any]:
        try:
            values = dict(json.loads(line))
            known = values["digests"] is not None if "event" in values else values["format"] <= FORMAT
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{str(path)!r} is not a trace: line {number} is {line[:60]!r}") from None
        if not known:
            raise ValueError(f"{str(path)!r} was written by a later version of Signalfire; upgrade to read it")
        if (environment := values.get("environment")) is not None and environment not in self.environments:
            self.environments.append(environment)
        return values


def read_traces(path: Path) -> list[TraceFile]:
    """The traces of all processes of a run, by rank."""
    ranks = ranks_of(path)
    return [TraceFile(file_of_rank(path, rank)) for rank in range(max(ranks, default=0) + 1)]
