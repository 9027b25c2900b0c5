"""Stores the runs of studies on disk: one line of JSON per run with its checksum, appended when the run finishes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from signalfire.authoring.checks import check_local
from signalfire.core.blame import warn

try:
    import fcntl
except ImportError:  # Windows: only studies of the same process exclude each other
    fcntl = None  # type: ignore[assignment]

__all__ = ["FORMAT", "Store", "StoreError", "StoreWarning"]

FORMAT = 2
"""The format of the lines; those of format 1 have neither checksum nor provenance, and are never used again."""

_NEEDED = {"configuration": str, "key": str, "off": list, "seed": int, "swapped": dict}
_OURS = (b'"configuration"', b'"metrics"', b'"swapped"', b'"sum": "')
_SUM = b', "sum": "%s"}'
_NUMBERS = ("metrics", "steps", "handlers")
"""What two lines of one run agree on, bit for bit."""

_OPENED = os.O_RDWR | getattr(os, "O_BINARY", 0)  # Windows would change the ends of lines

_written: set[str] = set()  # stores that studies of this process are writing


class StoreError(RuntimeError):
    """Raised for a store that cannot be read, or that another study is writing."""


class StoreWarning(UserWarning):
    """The warning about damaged lines of a store, whose runs are repeated."""


@dataclass
class _Content:
    """The lines of a store: of runs, by key; of format 1; and what no line of a study is any more, by number."""

    runs: dict[str, bytes] = field(default_factory=dict)
    old: list[bytes] = field(default_factory=list)
    damaged: dict[int, bytes] = field(default_factory=dict)


class Store:
    """A file with one line of JSON per finished run; each line is on disk before the next is written.

    Each line carries a checksum. A damaged line is reported with a `StoreWarning` and its run is repeated; two lines of one run
    with different numbers are an error. Lines of the format of version 0.1 are kept, but their runs are not used.

    The process may be killed at any moment: a truncated last line is ignored and then removed, and its run is repeated. When a
    study finishes, its store is rewritten atomically in a fixed order, so its content does not depend on the order in which
    the runs finished.

    A symbolic link stands for its file, which is locked and rewritten. A file with several hard links cannot be written: a
    rewrite would leave the other names with the old file.

    Args:
        path: Path of the file; it and its folder are created on the first write. None keeps the lines in memory.

    Example:
        >>> store = Store(None)
        >>> with store.writing():
        ...     store.append(
        ...         {"key": "a", "configuration": "c", "off": [], "swapped": {}, "seed": 0}
        ...     )
        >>> list(store.read())
        ['a']
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"Study(store={path!r}): expected a path, such as 'runs/ablation.jsonl', or None")
        self.path = None if path is None else check_local("Study", "store", path)
        if self.path is not None and self.path.is_dir():
            raise IsADirectoryError(f"Study(store={str(path)!r}): the path is a folder; pass a file in this folder")
        self._memory: list[bytes] = []
        self._reported: set[bytes] = set()
        self._file: int | None = None

    def read(self) -> dict[str, dict[str, Any]]:
        """The runs by key; if a run failed and was repeated, its last line.

        Raises:
            StoreError: for a line that is not a run of a study, except a truncated last line; and for two lines of one run with
                different numbers.
        """
        content = self._content()
        for number, line in content.damaged.items():
            if line not in self._reported:
                self._reported.add(line)
                warn(
                    StoreWarning(
                        f"line {number} of the store {str(self.path)!r} is damaged: its checksum does not match "
                        f"({_excerpt(line)}). The line is removed, and its run is repeated"
                    )
                )
        return {key: json.loads(line) for key, line in content.runs.items()}

    def old(self) -> list[dict[str, Any]]:
        """The lines of format 1, which say neither with which code they were made nor whether they are damaged."""
        return [json.loads(line) for line in self._content().old]

    def _content(self) -> _Content:
        lines, _ = self._split()
        found = _Content()
        numbers: dict[str, int] = {}
        for number, line in enumerate(lines, 1):
            record = _unsealed(line)
            if record is not None:
                key = record["key"]
                if key in numbers:
                    self._check_equal(json.loads(found.runs.pop(key)), record, numbers[key], number)
                found.runs[key], numbers[key] = line, number
            elif _is_old(line):
                found.old.append(line)
            elif any(mark in line for mark in _OURS):
                found.damaged[number] = line
            else:
                raise StoreError(
                    f"line {number} of the store {str(self.path)!r} does not hold a run of a study: {line[:60]!r}; "
                    "remove the line"
                )
        return found

    def _check_equal(self, first: Mapping[str, Any], second: Mapping[str, Any], one: int, other: int) -> None:
        """Raise an error for two finished runs of one key that came to different numbers."""
        if first.get("error") is not None or first == second:
            return
        differing = [name for name in _NUMBERS if first.get(name) != second.get(name)]
        if second.get("error") is not None:
            differing = ["error"]
        if differing:
            run = f"the run of {second.get('variant', 'one variant')!r} with seed {second['seed']}"
            values = [", ".join(f"{name} {line.get(name)}" for name in differing)[:400] for line in (first, second)]
            raise StoreError(
                f"lines {one} and {other} of the store {str(self.path)!r} both hold {run}, but with different results: "
                f"{values[0]}; {values[1]}. Remove one of the lines, and check the results with study.verify()"
            )

    def _split(self) -> tuple[list[bytes], int]:
        """The complete lines and their size in bytes, without a truncated last line."""
        if self.path is None:
            return list(self._memory), 0
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        *lines, rest = content.split(b"\n")
        # A line and its newline are written together: without the newline, the line may be truncated.
        if rest and (_unsealed(rest) is not None or _is_old(rest)):
            return [*lines, rest], len(content)
        return lines, len(content) - len(rest)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the store for writing inside the ``with`` block.

        Raises:
            StoreError: if another study is writing this store, or its file has several hard links.
            OSError: if the file cannot be written, such as on a full disk.
        """
        if self.path is None:
            yield
            return
        path = self.path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(path):
            lines, size = self._split()
            self._file = os.open(path, _OPENED | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                self._check_one_name(os.fstat(self._file).st_nlink)
                if os.fstat(self._file).st_size != size:
                    os.ftruncate(self._file, size)
                if lines and not _ends_a_line(self._file, size):
                    self._write(b"\n")
                _sync_folder(path.parent)
                yield
            finally:
                descriptor, self._file = self._file, None
                os.close(descriptor)

    def _check_one_name(self, names: int) -> None:
        if names > 1:
            raise StoreError(
                f"the store {str(self.path)!r} has {names} hard links. A study that opens the file through another link "
                "would not see the lock of this study, and rewriting the file would break the links; use a copy or a "
                "symbolic link instead"
            )

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        # The lock is a separate file, because the store itself is replaced. It is never removed: otherwise two studies could
        # lock two different files.
        lock = path.with_name(f".{path.name}.lock")
        name = str(lock.resolve())
        busy = (
            f"the store {str(self.path)!r} is being written by another study%s; wait until it finishes, or use a "
            "different store"
        )
        if name in _written:
            raise StoreError(busy % " of this process")
        _written.add(name)
        descriptor = -1
        try:
            descriptor = os.open(lock, _OPENED | os.O_CREAT, 0o666)
            if fcntl is not None:
                try:  # the system releases it if the process dies
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    owner = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                    raise StoreError(busy % (f" (process {owner})" if owner else "")) from None
            with self._named_in_errors():
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
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
            raise RuntimeError(
                "append() was called outside `with store.writing()`, where the store is not locked; call append() "
                "inside the block"
            )
        size = os.fstat(self._file).st_size
        with self._named_in_errors():
            try:
                while content:
                    content = content[os.write(self._file, content) :]
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, size)  # no part of a line stays
                raise

    @contextlib.contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        """Name the store in errors of the system, which know its descriptor only."""
        try:
            yield
        except OSError as error:
            reason = f"{error.strerror}: could not write to the store; the runs already in the store are kept"
            raise OSError(error.errno, reason, str(self.path)) from error

    def settle(self) -> None:
        """Rewrite the file atomically, with its lines in a fixed order, without superseded and damaged ones."""
        content = self._content()
        ordered = sorted([*content.runs.values(), *content.old], key=_sort_key)
        if self.path is None:
            self._memory = ordered
            return
        settled = b"".join(line + b"\n" for line in ordered)
        if settled == self.path.read_bytes():
            return
        path = self.path.resolve()
        new = path.with_name(f".{path.name}.new")
        with self._named_in_errors():
            try:
                with open(new, "wb") as file:
                    file.write(settled)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(new, os.stat(path).st_mode)
                os.replace(new, path)
            except OSError:
                new.unlink(missing_ok=True)
                raise
        _sync_folder(path.parent)
        if self._file is not None:  # later lines are appended to the new file
            os.close(self._file)
            self._file = os.open(path, _OPENED | os.O_APPEND)


def encode(line: Mapping[str, Any]) -> bytes:
    """A line of the store: JSON with sorted keys, non-finite numbers as strings, and a checksum of it all as the last entry."""
    content = json.dumps(_finite({**line, "format": FORMAT}), sort_keys=True, allow_nan=False).encode()
    return content[:-1] + _SUM % _sum(content)


def _sum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest()[:32].encode()


_LENGTH = len(_SUM % _sum(b""))


def _unsealed(line: bytes) -> dict[str, Any] | None:
    """The record of a line whose checksum fits."""
    content = line[:-_LENGTH] + b"}"
    return _record(content) if line[-_LENGTH:] == _SUM % _sum(content) else None


def _is_old(line: bytes) -> bool:
    """Whether this is a line of format 1."""
    record = _record(line)
    return record is not None and "format" not in record and "sum" not in record


def _record(line: bytes) -> dict[str, Any] | None:
    """What a line says of a run; None if it says nothing of one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # of brackets that are nested too deeply
        return None
    if not isinstance(record, dict):
        return None
    return record if all(isinstance(record.get(name), kind) for name, kind in _NEEDED.items()) else None


def _excerpt(line: bytes) -> str:
    """What a damaged line still says of its run."""
    variant, seed = (re.search(pattern, line) for pattern in (rb'"variant": "([^"]*)"', rb'"seed": (\d+)'))
    if variant is None or seed is None:
        return f"{line[:60]!r}..."
    return f"variant {variant[1].decode(errors='replace')!r}, seed {seed[1].decode()}"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # "nan", "inf" or "-inf", which float() accepts
    return value


def _sort_key(encoded: bytes) -> tuple[Any, ...]:
    line = json.loads(encoded)
    swapped = sorted(line["swapped"].items())
    return line["configuration"], line["seed"], len(line["off"]) + len(swapped), line["off"], swapped, line["key"]


def _ends_a_line(descriptor: int, size: int) -> bool:
    os.lseek(descriptor, size - 1, os.SEEK_SET)  # what is written is appended all the same
    return os.read(descriptor, 1) == b"\n"


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some systems cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
