"""Counting the runs that failed after they were resumed, so that a script that is restarted does not fail for ever."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from pathlib import Path

from .files import Files
from .store import open_version

__all__ = ["ResumeFailures"]

TRIES = 3


class ResumeFailures:
    """Counts, for each version of a handler, the runs that were resumed from it and failed before their next save.

    Each such run is an empty file ``<version>@<run>`` in a hidden folder; the next successful save removes them all.

    Args:
        folder: of the versions.
        handler: the handler's name.

    Attributes:
        resumed_from: the version that this run was resumed from, until it saves one itself; else None.
    """

    def __init__(self, folder: Path, handler: str) -> None:
        self.folder = folder
        self.handler = handler
        self.path = folder / f".{handler}.failures"
        self.resumed_from: str | None = None

    def resumed(self, version: str) -> None:
        """The run was resumed from a version."""
        self.resumed_from = version

    def add(self, run: str) -> None:
        """Count a run that failed, if it has not saved since it was resumed. All its processes may do so at the same time."""
        if self.resumed_from is not None:
            self.path.mkdir(exist_ok=True)
            (self.path / f"{self.resumed_from}@{run}").touch()

    def saved(self, *, clear: bool) -> None:
        """The run has saved a version of its own; ``clear`` the files, which is for one process to do."""
        if self.resumed_from is not None:
            self.resumed_from = None
            if clear:
                shutil.rmtree(self.path, ignore_errors=True)  # files that stay only shorten a later count

    def given_up(self) -> list[str]:
        """The versions from which three runs failed."""
        if not self.path.is_dir():
            return []
        counts = Counter(path.name.rpartition("@")[0] for path in self.path.iterdir())
        return sorted(name for name, runs in counts.items() if runs >= TRIES)

    def newest(self, *, where: str, files: Files) -> str | None:
        """The name of the newest good version that was not given up; None if the folder holds no version.

        Args:
            where: the caller, for messages.
            files: the operations to use.

        Raises:
            FileNotFoundError: if all versions were given up.
        """
        given_up = self.given_up()
        failed = f"{TRIES} runs that resumed from {', '.join(given_up)} failed before the next checkpoint was written"
        try:
            path, *_ = open_version(self.folder, name=self.handler, where=where, files=files, without=given_up)
        except FileNotFoundError:
            if not given_up:
                return None
            raise FileNotFoundError(
                f"{where}: {failed}, and there is no other; remove {self.path.name!r} from the folder to try again"
            ) from None
        if given_up:
            warnings.warn(f"{where}: {failed}; this run resumes from {path.name}", RuntimeWarning, stacklevel=2)
        return path.name
