"""Undelivered items of a remote logger, as JSON lines in a file beside the run."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

__all__ = ["Item", "KeptFile", "Kind"]

Kind = Literal["numbers", "image", "text", "histogram"]


class Item(NamedTuple):
    """An item of a remote logger: the numbers of one point of the run, or one image, text or histogram.

    Attributes:
        number: its place among the items of the run, from 1; a resumed run gives the same item the same number.
        epoch, iteration, step: where it was logged; ``step`` counts the first update's optimizer steps.
        time: when it was logged, in seconds since 1970.
        kind: "numbers", "image", "text" or "histogram".
        values: numbers by name; or one name with a PNG file as bytes, a text, or the counts and the edges of the bins.
        before: how many values of each name this iteration has in earlier items.
    """

    number: int
    epoch: int
    iteration: int
    step: int
    time: float
    kind: Kind
    values: Mapping[str, Any]
    before: Mapping[str, int]


class KeptFile:
    """A file of items that can be appended to, read from the front, and cut.

    The first line names the run that the items belong to, and each further line is an item. A line that a killed process has not
    finished is ignored. The file exists only while it holds something.

    Args:
        path: the file.
        header: the content of the first line.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.header = dict(header)
        self._file: IO[bytes] | None = None
        self.size = 0

    @staticmethod
    def load(path: Path) -> tuple[dict[str, Any], list[Item]]:
        """The first line, and the items in their order, each once.

        Raises:
            ValueError: if the file is not of this kind.
        """
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")[:-1]
        try:
            header = json.loads(lines[0])
            items = {item.number: item for item in map(_decoded, lines[1:])}
            return dict(header), [items[number] for number in sorted(items)]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is not a file of unsent rows from a remote logger") from error

    def append(self, items: Iterable[Item]) -> None:
        """Write items to the operating system at once, so they outlive the process."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab")  # noqa: SIM115 (closed in `close`)
            self.size = self._file.tell()
        lines = [] if self.size else [json.dumps(self.header)]
        content = "".join(f"{line}\n" for line in [*lines, *map(_encoded, items)]).encode()
        self._file.write(content)
        self._file.flush()
        self.size += len(content)

    def replace(self, items: Iterable[Item]) -> None:
        """Replace all items in the file with these; the file is never seen half written."""
        self.close()
        content = "".join(f"{line}\n" for line in [json.dumps(self.header), *map(_encoded, items)]).encode()
        temporary = self.path.with_name(f".{self.path.name}.new")
        temporary.write_bytes(content)
        os.replace(temporary, self.path)
        self.size = len(content)

    def read(self, offset: int, count: int) -> tuple[list[bytes], int]:
        """This many lines from here on, for `decoded`, and the position of the next line."""
        with open(self.path, "rb") as file:
            if offset == 0:
                offset = len(file.readline())
            file.seek(offset)
            lines = [line for line in (file.readline() for _ in range(count)) if line.endswith(b"\n")]
        return lines, offset + sum(map(len, lines))

    @staticmethod
    def decoded(lines: Iterable[bytes]) -> list[Item]:
        """The items of these lines."""
        return [_decoded(line.decode()) for line in lines]

    def remove(self) -> None:
        """Remove the file."""
        self.close()
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.size = 0

    def close(self) -> None:
        """Close the file, which is kept."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _encoded(item: Item) -> str:
    values: dict[str, Any] = dict(item.values)
    if item.kind == "numbers":
        values = {name: _number(value) for name, value in values.items()}
    elif item.kind == "image":
        values = {name: base64.b64encode(value).decode() for name, value in values.items()}
    return json.dumps(item._replace(values=values, before=dict(item.before))._asdict(), allow_nan=False)


def _decoded(line: str) -> Item:
    item = Item(**json.loads(line))
    if item.kind == "numbers":
        return item._replace(values={name: float(value) for name, value in item.values.items()})
    if item.kind == "image":
        return item._replace(values={name: base64.b64decode(value) for name, value in item.values.items()})
    return item


def _number(value: float) -> float | str:
    """A number for JSON; non-finite numbers are strings, which ``float`` accepts."""
    return value if math.isfinite(value) else str(value)
