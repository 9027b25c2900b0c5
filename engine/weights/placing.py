"""Writes a file atomically: after a crash at any moment there is the old one or the new one, whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..authoring.checks import check_local
from ..checkpoints import Files, hidden_name, make_folders
from ..checkpoints.names import match_hidden
from ..distributed.liveness import is_alive

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["check_target", "place", "place_on_rank_zero"]


def check_target(where: str, path: str | os.PathLike[str], *suffixes: str) -> Path:
    """Check the path of a file to write.

    Raises:
        TypeError: If it is not a path.
        ValueError: If it is a URL, or has none of the suffixes.
        IsADirectoryError: If it is a folder.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{where}(path={path!r}): expected a path, such as 'model{suffixes[0]}'")
    target = check_local(where, "path", path)
    if target.suffix not in suffixes:
        ends = " or ".join(map(repr, suffixes))
        raise ValueError(f"{where}(path={os.fspath(path)!r}): expected a file name that ends with {ends}")
    if target.is_dir():
        raise IsADirectoryError(f"{where}(path={os.fspath(path)!r}): the path is a folder; pass the path of a file")
    return target


def place(path: Path, write: Callable[[BinaryIO], None], check: Callable[[Path], None], files: Files) -> None:
    """Write a file beside its place, sync it, check it, and only then rename it.

    Args:
        path: The file; an existing one is replaced.
        write: Writes the content.
        check: Raises an error if what was written is not what it should be.
        files: File-system operations.
    """
    make_folders(path.parent, files)
    _clean(path, files)
    new = hidden_name(path.parent, path.name, "new")
    try:
        files.write(new, write)
        files.sync(new)
        check(new)
        files.rename(new, path)
        files.sync(path.parent)
    except BaseException as error:
        error.add_note(f"while writing {os.fspath(path)!r}; an existing file at this path is unchanged")
        with contextlib.suppress(OSError):
            files.remove(new)
        raise


def _clean(path: Path, files: Files) -> None:
    """Remove what dead processes have left of this file."""
    for entry in files.list(path.parent):
        found = match_hidden(entry)
        if found is not None and found["name"] == path.name and found["kind"] == "new":
            left = path.parent / entry
            if is_alive(found["owner"]) is False and not left.is_dir():
                with contextlib.suppress(OSError):
                    files.remove(left)


def place_on_rank_zero(
    engine: Engine, path: Path, write: Callable[[BinaryIO], None], check: Callable[[Path], None], files: Files
) -> None:
    """Let rank 0 write; an error of it is raised on all ranks."""
    problem: BaseException | None = None
    if engine.processes.is_rank_zero:
        try:
            place(path, write, check, files)
        except Exception as error:
            problem = error
    text = engine.processes.broadcast(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    if text is not None:
        raise RuntimeError(f"rank 0 could not write {os.fspath(path)!r}: {text}")
