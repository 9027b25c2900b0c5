"""Folders to write into, checked before there is anything to be lost. Not a handler."""

from __future__ import annotations

import os
from pathlib import Path

from signalfire import Handler

__all__ = ["check_folder", "open_folder"]


def check_folder(handler: Handler, folder: str | os.PathLike[str]) -> Path:
    """Check a ``folder=`` argument.

    Raises:
        TypeError: if it is no path.
        NotADirectoryError: if there is something else in its place.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{type(handler).__name__}(folder={folder!r}): it has to be a path, such as 'runs/first'")
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{type(handler).__name__}(folder={str(folder)!r}): it exists and is no folder")
    return path


def open_folder(handler: Handler, folder: Path) -> None:
    """Make the folder if it is not there.

    Raises:
        PermissionError: if nothing can be written into it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{handler.name!r}: the folder {str(folder)!r} cannot be written")
