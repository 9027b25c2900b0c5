"""The file-system operations of checkpoints, so that a test can record each of them or make it fail."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["Files", "make_folders", "remove_folder"]


class Files:
    """The file-system operations; a subclass may record them or raise an OSError."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, content: bytes | memoryview) -> None:
        with open(path, "xb") as file:
            file.write(content)

    def sync(self, path: Path) -> None:
        """Block until the content of a file, or the entries of a folder, are on disk."""
        descriptor = os.open(path, os.O_RDONLY)
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

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)


def make_folders(folder: Path, files: Files) -> None:
    """Create a folder and its parents, and sync them to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            files.make_folder(path)
        files.sync(path.parent)


def remove_folder(folder: Path, files: Files) -> list[OSError]:
    """Remove a folder and the files in it; continues after errors and returns them."""
    problems = []

    def attempt(remove: Callable[[Path], None], path: Path) -> None:
        try:
            remove(path)
        except FileNotFoundError:
            pass
        except OSError as problem:
            problems.append(problem)

    try:
        inside = files.list(folder)
    except OSError as problem:
        return [] if isinstance(problem, FileNotFoundError) else [problem]
    for file in inside:
        attempt(files.remove, folder / file)
    attempt(files.remove_folder, folder)
    return problems
