"""Counts the runs that failed after resuming, so that a restarted script does not fail forever."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.blame import warn
from .files import Files
from .loading import load_newest

__all__ = ["ResumeFailures"]

TRIES = 3


class ResumeFailures:
    """Counts, for each version of a handler, the runs that resumed from it and failed before their next save.

    Each such run is recorded as an empty file ``<version>@<run>`` in a hidden folder; the next successful save removes them all.

    Args:
        folder: Folder of the versions.
        handler: Name of the handler.

    Attributes:
        resumed_from: Version that this run resumed from, until the run saves one itself; else None.
    """

    def __init__(self, folder: Path, handler: str) -> None:
        self.folder = folder
        self.handler = handler
        self.path = folder / f".{handler}.failures"
        self.resumed_from: str | None = None

    def resumed(self, version: str) -> None:
        """Note the version that the run resumed from."""
        self.resumed_from = version

    def add(self, run: str) -> None:
        """Record that a run failed, if it has not saved since it resumed. All ranks may call this at the same time."""
        if self.resumed_from is not None:
            with suppress(FileNotFoundError):  # another run has just saved, and removed the records
                self.path.mkdir(exist_ok=True)
                (self.path / f"{self.resumed_from}@{run}").touch()

    def saved(self, *, clear: bool) -> None:
        """Note that the run has saved a version.

        Args:
            clear: Whether to remove the records, which only one rank should do.
        """
        if self.resumed_from is not None:
            self.resumed_from = None
            if clear:
                # After an error, a remaining file only makes a later count reach its limit sooner.
                shutil.rmtree(self.path, ignore_errors=True)

    def given_up(self) -> list[str]:
        """The versions from which three resumed runs failed."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        counts = Counter(name.rpartition("@")[0] for name in names)
        return sorted(name for name, runs in counts.items() if runs >= TRIES)

    def newest(self, *, where: str, files: Files) -> tuple[str, dict[str, Any]] | None:
        """The newest intact version that is not given up, as its name and its state; None if the folder contains no version.

        Args:
            where: Caller, for messages.
            files: File-system operations.

        Raises:
            FileNotFoundError: if all versions are given up.
        """
        given_up = self.given_up()
        failed = f"{TRIES} runs that resumed from {', '.join(given_up)} failed before they wrote another checkpoint"
        try:
            found = load_newest(self.folder, name=self.handler, where=where, files=files, without=given_up)
        except FileNotFoundError:
            if not given_up:
                return None
            raise FileNotFoundError(
                f"{where}: {failed}, and the folder contains no other checkpoint; to try again, delete "
                f"{self.path.name!r} from the folder"
            ) from None
        if given_up:
            warn(f"{where}: {failed}; this run resumes from {found[0]}", RuntimeWarning)
        return found
