"""Output folders: checks before there are results to lose, and entries that all ranks read from one folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from signalfire import Handler
from signalfire.authoring import check_local
from signalfire.authoring.checks import check_parents, shown_path
from signalfire.checkpoints import hidden_name
from signalfire.distributed import Processes

__all__ = ["check_folder", "check_shared", "open_folder", "read_together", "shown_path"]


def check_folder(handler: Handler, folder: str | os.PathLike[str]) -> Path:
    """Check a ``folder=`` argument, and make it absolute.

    Raises:
        TypeError: If it is not a path.
        ValueError: If it is empty, or a URL.
        NotADirectoryError: If the path exists and is not a folder, or is below a file.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{type(handler).__name__}(folder={folder!r}): expected a path, such as 'runs/first'")
    path = check_local(handler, "folder", folder)
    check_parents(handler, "folder", path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(
            f"{type(handler).__name__}(folder={str(folder)!r}): this path exists but is not a folder; choose a "
            "different one"
        )
    return path


def open_folder(handler: Handler, folder: Path) -> None:
    """Create the folder if it does not exist.

    Raises:
        PermissionError: If the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{handler.name!r}: the folder {str(folder)!r} is not writable")


def check_shared(handler: Handler, folder: Path, processes: Processes) -> None:
    """Raise ValueError if a rank does not see the folder that rank 0 writes to, such as on a different machine. Collective."""
    marker = hidden_name(folder, "shared", "new")
    if processes.is_rank_zero:
        marker.mkdir()
    try:
        name = processes.broadcast(marker.name)
        found = processes.gather((os.path.isdir(folder / name), os.path.abspath(folder), socket.gethostname()))
    finally:
        if processes.is_rank_zero:
            marker.rmdir()
    for rank, (sees, own, host) in enumerate(found):
        if not sees:
            raise ValueError(
                f"{handler.name!r}: rank 0 writes to {found[0][1]!r} on {found[0][2]}, but rank {rank} cannot find "
                f"the files from rank 0 in {own!r} on {host}; use the same folder on a shared file system for all ranks"
            )


def read_together(
    handler: Handler,
    folder: Path,
    processes: Processes,
    newest: Callable[[], tuple[str, dict[str, Any]] | None],
    load: Callable[[Path], dict[str, Any]],
) -> tuple[str, dict[str, Any]] | None:
    """The entry that rank 0 finds in a folder, read on each rank by its name. Collective.

    If a different run removes the entry before all ranks have read it, rank 0 searches again.

    Args:
        handler: The handler that reads.
        folder: The folder.
        processes: The ranks.
        newest: Finds and reads the entry, on rank 0; None if there is none.
        load: Reads the entry on another rank.
    """
    while True:
        found = newest() if processes.is_rank_zero else None
        name = processes.broadcast(None if found is None else found[0])
        if name is None or not processes.distributed:
            return found
        check_shared(handler, folder, processes)
        if found is None:
            with suppress(FileNotFoundError):
                found = name, load(folder / name)
        if not processes.any(found is None):
            return found
