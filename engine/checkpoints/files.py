"""The file-system operations of checkpoints, so that a test can record each of them or make it fail."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["Content", "Files", "WrongSize", "make_folders", "remove_folder"]

Content = bytes | Callable[[BinaryIO], None]
"""The content of a file, or what writes it to an open file."""


class Files:
    """The file-system operations; a subclass may record them or raise an OSError."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, content: Content) -> None:
        """Write a new file."""
        with open(path, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)

    def sync(self, path: Path) -> None:
        """Block until the content of a file, or the entries of a folder, are on disk."""
        if sys.platform == "win32" and path.is_dir():
            return  # Windows opens no folders
        descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder; raises an OSError if ``new`` is a folder that is not empty."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def list(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def read(self, path: Path, most: int) -> bytes:
        """The content of a regular file.

        Args:
            path: The file.
            most: Largest size that it may have; a larger one raises a `WrongSize`, and is not read.
        """
        with self.open(path, most=most) as file:
            return file.read()

    def open(self, path: Path, size: int | None = None, most: int | None = None) -> BinaryIO:
        """Open a regular file for reading; a pipe or a device raises an OSError at once, and is never waited for.

        Args:
            path: The file.
            size: Size that the file should have; one of another size raises a `WrongSize`.
            most: Largest size that it may have.
        """
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115  # the caller closes it
        try:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            if size not in (None, found.st_size) or (most is not None and found.st_size > most):
                raise WrongSize(found.st_size)
        except OSError:
            file.close()
            raise
        return file

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def mark(self, path: Path) -> tuple[int, int] | None:
        """What tells a folder from another one that takes its name; None if there is none."""
        try:
            found = os.stat(path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # which Windows lacks


class WrongSize(OSError):
    """Raised for a file that does not have the expected size; ``size`` is the one that it has."""

    def __init__(self, size: int) -> None:
        super().__init__(errno.EINVAL, f"the file has {size} bytes")
        self.size = size


def make_folders(folder: Path, files: Files) -> None:
    """Create a folder and its parents, and sync them to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            files.make_folder(path)
        files.sync(path.parent)


def remove_folder(folder: Path, files: Files) -> list[OSError]:
    """Remove a folder and the files in it; continues after errors and returns them. Of a link, only the link is removed."""
    problems = []

    def attempt(remove: Callable[[Path], None], path: Path) -> None:
        try:
            remove(path)
        except FileNotFoundError:
            pass
        except OSError as problem:
            problems.append(problem)

    if folder.is_symlink():
        attempt(files.remove, folder)
        return problems
    try:
        inside = files.list(folder)
    except OSError as problem:
        return [] if isinstance(problem, FileNotFoundError) else [problem]
    for file in inside:
        attempt(files.remove, folder / file)
    attempt(files.remove_folder, folder)
    return problems
