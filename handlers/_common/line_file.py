"""A file of lines that survives a kill at any moment, and that can be cut to a known beginning."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from signalfire.checkpoints import Files

__all__ = ["LineFile", "temporary_name"]

_CHUNK = 2**20


class LineFile:
    """An open file to which lines are appended, each completely or not at all.

    Attributes:
        length: Size in bytes.
        failed: Whether a write failed.
    """

    def __init__(self, file: IO[bytes], length: int, content: Any) -> None:
        self._file = file
        self._content = content
        self._synced = False
        self.length = length
        self.failed = False

    @classmethod
    def reopen(cls, path: Path, length: int, digest: str) -> LineFile | None:
        """Truncate a file to a known prefix; None if it starts differently. Safe if the process is killed at any moment."""
        if length == 0 or not path.is_file():
            return None
        content = hashlib.sha256()
        left = length
        with open(path, "rb") as file:
            while left and (part := file.read(min(left, _CHUNK))):
                content.update(part)
                left -= len(part)
        if left or content.hexdigest() != digest:
            return None
        os.truncate(path, length)
        return cls(open(path, "ab", buffering=0), length, content)

    @classmethod
    def cut(cls, path: Path, length: int) -> LineFile:
        """Truncate a file to a length."""
        os.truncate(path, length)
        return cls(open(path, "ab", buffering=0), length, hashlib.sha256(path.read_bytes()))

    @staticmethod
    def back_up(path: Path) -> None:
        """Copy a file to a different name, ``log.csv`` to ``log.1.csv``; it is not renamed, so it exists at any moment."""
        backups = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
        shutil.copy2(path, next(backup for backup in backups if not backup.exists()))

    @classmethod
    def create(cls, path: Path, lines: str) -> LineFile:
        """Create a file with these lines, after a backup of an existing one."""
        if path.exists() and path.stat().st_size:
            cls.back_up(path)
        return cls.replace(path, lines)

    @classmethod
    def replace(cls, path: Path, lines: str) -> LineFile:
        """Create a file with these lines in place of any other."""
        temporary = temporary_name(path)
        data = lines.encode()
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        Files().sync(path.parent)
        return cls(open(path, "ab", buffering=0), len(data), hashlib.sha256(data))

    @property
    def digest(self) -> str:
        digest: str = self._content.hexdigest()
        return digest

    def append(self, lines: str) -> None:
        data = lines.encode()
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
        except BaseException:
            self.failed = True
            with suppress(OSError):
                self._file.truncate(self.length)  # no partial line, not even on a full disk
            raise
        self._content.update(data)
        self.length += len(data)
        self._synced = False

    def is_at(self, path: Path) -> bool:
        """Whether this is the file at a path."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(path))
        except FileNotFoundError:
            return False

    def sync(self) -> None:
        if not self._synced:
            os.fsync(self._file.fileno())
            self._synced = True

    def close(self) -> None:
        try:
            self.sync()
        finally:
            self._file.close()


def temporary_name(path: Path) -> Path:
    """Where a file is written before it is renamed to ``path``."""
    return path.with_name(f".{path.name}.new")
