"""Stores the runs of studies on disk: one line of JSON per run, appended when the run finishes."""

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
except ImportError:  # Windows: only studies of the same process exclude each other
    fcntl = None  # type: ignore[assignment]

__all__ = ["Store", "StoreError"]

_NEEDED = ("configuration", "key", "off", "seed", "swapped")
_written: set[str] = set()  # stores that studies of this process are writing


class StoreError(RuntimeError):
    """Raised for a store that cannot be read, or that another study is writing."""


class Store:
    """A file with one line of JSON per finished run; each line is on disk before the next is written.

    The process may be killed at any moment: a truncated last line is ignored and then removed, and its run is made again. When a
    study finishes, its store is rewritten atomically in a fixed order, so its content does not depend on the order in which
    the runs finished.

    Args:
        path: Path of the file; it and its folder are created on the first write. None keeps the lines in memory.

    Example:
        >>> store = Store(None)
        >>> with store.writing():
        ...     store.append({"key": "a", "configuration": "c", "off": [], "swapped": {}, "seed": 0})
        >>> list(store.read())
        ['a']
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"Study(store={path!r}): expected a path, such as 'runs/ablation.jsonl', or None")
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.is_dir():
            raise IsADirectoryError(f"Study(store={str(path)!r}): this is a folder; use a file in it")
        self._memory: list[bytes] = []
        self._file: int | None = None

    def read(self) -> dict[str, dict[str, Any]]:
        """The lines by key; if a key occurs more than once, its last line.

        Raises:
            StoreError: for a line that is not a run of a study, except a truncated last line.
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
                    f"line {number} of the store {str(self.path)!r} is not a run of a study: {line[:60]!r}; remove the line"
                ) from None
            found.pop(key, None)
            found[key] = line
        return found

    def _split(self) -> tuple[list[bytes], int]:
        """The complete lines and their size in bytes, without a truncated last line."""
        if self.path is None:
            return list(self._memory), 0
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        *lines, rest = content.split(b"\n")
        if rest:  # a line and its newline are written together: without the newline, the line may be truncated
            with contextlib.suppress(ValueError):
                json.loads(rest)
                return [*lines, rest], len(content)
        return lines, len(content) - len(rest)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the store for writing inside the ``with`` block.

        Raises:
            StoreError: if another study is writing this store.
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
        # The lock is a separate file, because the store itself is replaced. It is never removed: otherwise two studies could
        # lock two different files.
        lock = path.with_name(f".{path.name}.lock")
        name = str(lock.resolve())
        busy = (
            f"the store {str(path)!r} is being written by another study%s; wait until it finishes, or use another store"
        )
        if name in _written:
            raise StoreError(busy % " of this process")
        _written.add(name)
        descriptor = -1
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
            if fcntl is not None:
                try:  # the system releases it if the process dies
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
        """Append the line of a run; it is on disk when this returns."""
        encoded = encode(line)
        if self.path is None:
            self._memory.append(encoded)
            return
        self._write(encoded + b"\n")

    def _write(self, content: bytes) -> None:
        if self._file is None:
            raise RuntimeError("append() was called outside `with store.writing()`; the store is locked only inside it")
        while content:
            content = content[os.write(self._file, content) :]
        os.fsync(self._file)

    def settle(self) -> None:
        """Rewrite the file atomically, with its lines in a fixed order and without superseded ones."""
        ordered = [line for _, line in sorted(self._lines().items(), key=_sort_key)]
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
        if self._file is not None:  # later lines are appended to the new file
            os.close(self._file)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)


def encode(line: Mapping[str, Any]) -> bytes:
    """A line of the store: JSON with sorted keys, and non-finite numbers as strings."""
    return json.dumps(_finite(line), sort_keys=True, allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # "nan", "inf" or "-inf", which float() accepts
    return value


def _sort_key(item: tuple[str, bytes]) -> tuple[Any, ...]:
    line = json.loads(item[1])
    swapped = sorted(line["swapped"].items())
    return line["configuration"], line["seed"], len(line["off"]) + len(swapped), line["off"], swapped, item[0]


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some systems cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
