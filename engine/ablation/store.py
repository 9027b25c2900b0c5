"""The runs of studies on disk: one line of JSON for each, appended when the run is finished."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: studies of one process are still told apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["Store", "StoreError"]

_NEEDED = ("configuration", "key", "off", "seed", "swapped")
_written: set[str] = set()  # the stores that studies of this process write


class StoreError(RuntimeError):
    """A store that cannot be read, or that another study writes."""


class Store:
    """Lines of JSON, one for each finished run; each is on disk before the next is written.

    A process may be killed at any moment: a last line that is cut off is ignored and then removed, and its run is made again.
    Once a study is finished, its store is rewritten in a fixed order, atomically; so it depends on the runs alone, and not on
    which of them was finished first.

    Args:
        path: the file; it and its folder are made when something is written. None keeps the lines in memory.

    Example:
        >>> store = Store(None)
        >>> with store.writing():
        ...     store.append({"key": "a", "configuration": "c", "off": [], "swapped": {}, "seed": 0})
        >>> list(store.read())
        ['a']
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"Study(store={path!r}): it has to be a path, such as 'runs/ablation.jsonl', or None")
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.is_dir():
            raise IsADirectoryError(f"Study(store={str(path)!r}): it is a folder; give a file in it")
        self._memory: list[bytes] = []
        self._file: int | None = None

    def read(self) -> dict[str, dict[str, Any]]:
        """The lines by their keys; of several with one key, the last.

        Raises:
            StoreError: for a line that is no run of a study, other than a last one that is cut off.
        """
        return {key: json.loads(line) for key, line in self._lines().items()}

    def _lines(self) -> dict[str, bytes]:
        lines, _ = self._split()
        found: dict[str, bytes] = {}
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                key = record["key"]
                if not isinstance(key, str) or not all(name in record for name in _NEEDED):
                    raise KeyError
            except (ValueError, KeyError, TypeError):
                raise StoreError(
                    f"line {number} of the store {str(self.path)!r} is no run of a study: {line[:60]!r}; mend or remove the line"
                ) from None
            found.pop(key, None)
            found[key] = line
        return found

    def _split(self) -> tuple[list[bytes], int]:
        """The whole lines, and how many bytes they take up; what is cut off at the end is left out."""
        if self.path is None:
            return list(self._memory), 0
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        *lines, rest = content.split(b"\n")
        if rest:  # the newline is written with its line: without it, the line may be cut off anywhere
            with contextlib.suppress(ValueError):
                json.loads(rest)
                return [*lines, rest], len(content)
        return lines, len(content) - len(rest)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only one who writes.

        Raises:
            StoreError: if another study writes this store.
        """
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(self.path):
            lines, size = self._split()
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                if os.fstat(self._file).st_size != size:
                    os.ftruncate(self._file, size)
                if lines and os.pread(self._file, 1, size - 1) != b"\n":
                    self._write(b"\n")
                _sync_folder(self.path.parent)
                yield
            finally:
                descriptor, self._file = self._file, None
                os.close(descriptor)

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        # A file beside the store, which is itself replaced. It is left there: to remove it would let two studies lock two files.
        lock = path.with_name(f".{path.name}.lock")
        name = str(lock.resolve())
        busy = f"the store {str(path)!r} is being written by another study%s; wait for it, or take another store"
        if name in _written:
            raise StoreError(busy % " of this process")
        _written.add(name)
        descriptor = -1
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
            if fcntl is not None:
                try:  # the system lets go of it if the process dies
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    owner = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                    raise StoreError(busy % (f" (process {owner})" if owner else "")) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            _written.discard(name)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a run's line; it is on disk when this returns."""
        encoded = encode(line)
        if self.path is None:
            self._memory.append(encoded)
            return
        self._write(encoded + b"\n")

    def _write(self, content: bytes) -> None:
        if self._file is None:
            raise RuntimeError("the store is written inside `with store.writing()` only")
        while content:
            content = content[os.write(self._file, content) :]
        os.fsync(self._file)

    def settle(self) -> None:
        """Put the lines into a fixed order, without those that later ones have replaced; all of it or nothing."""
        ordered = [line for _, line in sorted(self._lines().items(), key=_place)]
        if self.path is None:
            self._memory = ordered
            return
        content = b"".join(line + b"\n" for line in ordered)
        if content == self.path.read_bytes():
            return
        new = self.path.with_name(f".{self.path.name}.new")
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(new, os.stat(self.path).st_mode)
        os.replace(new, self.path)
        _sync_folder(self.path.parent)
        if self._file is not None:  # what is appended from now on goes to the new file
            os.close(self._file)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)


def encode(line: Mapping[str, Any]) -> bytes:
    """A line of the store: JSON with sorted keys, in which numbers that are not finite are strings."""
    return json.dumps(_finite(line), sort_keys=True, allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # "nan", "inf" or "-inf", which float() takes
    return value


def _place(item: tuple[str, bytes]) -> tuple[Any, ...]:
    line = json.loads(item[1])
    swapped = sorted(line["swapped"].items())
    return line["configuration"], line["seed"], len(line["off"]) + len(swapped), line["off"], swapped, item[0]


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # where folders cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
