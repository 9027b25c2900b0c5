"""Base of the text loggers: lines are written whole, and a resumed run continues the file from its checkpoint."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from signalfire import Engine, Events, Interval, Phase, on
from signalfire.authoring import check_bool, check_local
from signalfire.authoring.checks import check_parents

from .claims import FILE
from .folders import open_folder
from .line_file import LineFile, temporary_name
from .scalars import Record, ScalarLogger

__all__ = ["TextLogger"]


class TextLogger(ScalarLogger):
    """Appends lines to a file, and truncates it to the position in a loaded checkpoint.

    Each record is written to the operating system at once, so a killed process loses none. `sync_written` flushes the records to
    disk before a checkpoint refers to them. The state holds the file's length and the sha256 of its content. On resuming, a file
    that starts with this content is truncated to that length. Any other file is backed up under a different name, ``log.csv`` as
    ``log.1.csv``, which is never changed. If it is a log of this kind, the records before the checkpoint's last one are copied
    from it, and a warning (W34) reports that some may be missing.

    Args:
        path: The file; its folder is created if it does not exist.
        every: As for `ScalarLogger`.
        time: Whether to log the time of each record, in seconds since 1970.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: str | Interval = "10it",
        time: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(every=every, name=name)
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"{type(self).__name__}(path={path!r}): expected the path of a file")
        self.path = check_local(self, "path", path)
        check_parents(self, "path", self.path)
        self.time = check_bool(self, "time", time)
        if self.path.is_dir():
            raise IsADirectoryError(
                f"{type(self).__name__}(path={str(path)!r}): this is a folder; pass the path of a file in it"
            )
        self._file: LineFile | None = None
        self._length = 0
        self._digest = ""
        self._last_iteration = 0
        self._last_lines = ""  # of the last iteration in which something was written
        self._evaluations = 0  # of a trainer that ran the engine
        self._is_placed = False  # the file was in its place as the run was completed

    @property
    def header(self) -> str:
        """The first line, with its line end, or none."""
        return ""

    @abstractmethod
    def lines(self, record: Record) -> str:
        """The lines of a record, each with its line end."""

    @abstractmethod
    def iteration_of(self, line: str) -> int:
        """The iteration of a line.

        Raises:
            ValueError: If it is not a line of this kind of log.
        """

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(FILE, by=self, target=repr(os.path.abspath(self.path)))

    @on(Events.STARTED, phase=Phase.RECORD, reads=["metrics"], writes=["files"])
    def begin(self, engine: Engine) -> None:
        super().begin(engine)
        open_folder(self, self.path.parent)
        self._evaluations += engine.findings.is_within
        if self._evaluations > 1:
            engine.findings.report(
                "W62",
                f"{self.name!r} is attached to an evaluator that a trainer runs several times, so its rows have the "
                "epochs and iterations of the evaluator, which counts from 1 in each evaluation",
                "attach it to the training engine instead; the log then also contains the evaluation results",
                self.name,
            )

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD, reads=[], writes=["files"])
    def resume(self, engine: Engine) -> None:
        """Truncate the file to the checkpoint's position."""
        super().resume(engine)
        self._close()
        if self._length or self.path.exists():
            self._open()

    def record(self, record: Record) -> None:
        """Append the record to the file."""
        lines = self.lines(record)
        if self._file is None:
            self._open()
        assert self._file is not None
        try:  # `_path_in_errors` would cost 1.3 us for each row
            self._file.append(lines)
        except OSError as error:
            self._add_path(error)
            raise
        if record.iteration != self._last_iteration:
            self._last_iteration, self._last_lines = record.iteration, ""
        self._last_lines += lines

    def _open(self) -> None:
        with self._path_in_errors():
            temporary_name(self.path).unlink(missing_ok=True)  # left by a process that was killed
            self._file = LineFile.reopen(self.path, self._length, self._digest)
            if self._file is None:
                known = self.header + self._earlier_lines() + self._last_lines if self._length else self.header
                self._file = LineFile.create(self.path, known)

    def _earlier_lines(self) -> str:
        """The lines before those that the checkpoint holds itself, from a file that differs from the saved digest."""
        if not self.path.exists():
            self._report_gap("the file does not exist")
            return ""
        kept: list[str] = []
        with open(self.path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if line == self.header:
                    continue
                try:
                    if line.endswith("\n") and self.iteration_of(line) < self._last_iteration:
                        kept.append(line)
                except ValueError:
                    continue
        end = (
            f"the last row before iteration {self._last_iteration} is {kept[-1].strip()!r}"
            if kept
            else f"the file has no rows before iteration {self._last_iteration}"
        )
        differs = "is shorter than" if self.path.stat().st_size < self._length else "differs from"
        self._report_gap(f"{end}, and the file {differs} the one that the saved run wrote", "may")
        return "".join(kept)

    def _report_gap(self, what: str, verb: str = "will") -> None:
        if (engine := self.engine) is not None:
            engine.findings.report(
                "W34",
                f"the log {str(self.path)!r} of {self.name!r} does not pick up where the loaded state left off: {what}",
                f"before resuming, restore the log of the run that saved the state; otherwise, rows {verb} be missing",
                self.name,
            )

    @on(Events.COMPLETED, phase=Phase.PREPARE, reads=[], writes=[])
    def note_place(self, engine: Engine) -> None:
        """Note whether the file is in its place as the run ends; it may be moved afterwards."""
        self._is_placed = self._file is not None and self._file.is_at(self.path)

    @on(Events.ENDED, phase=Phase.PERSIST, reads=["metrics"], writes=["files"])
    def close(self, engine: Engine) -> None:
        """Flush the file to disk and close it."""
        super().close(engine)
        if not self._is_placed:
            self._check_place()
        self._is_placed = False
        self._close()

    def _check_place(self) -> None:
        """Report a file that is no longer the one at its path, so later rows do not reach it."""
        if self._file is not None and (engine := self.engine) is not None and not self._file.is_at(self.path):
            engine.findings.report(
                "W38",
                f"{self.name!r}: the log {str(self.path)!r} was moved, replaced or removed during this run, so its "
                "later rows are not at this path; another process may be writing to the same path",
                "use a separate folder for each run",
                self.name,
            )

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        self._length, self._digest = file.length, file.digest
        with suppress(OSError) if file.failed else self._path_in_errors():
            file.close()

    @contextmanager
    def _path_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._add_path(error)
            raise

    def _add_path(self, error: OSError) -> None:
        error.add_note(f"{self.name!r} ({type(self).__name__}): the log {str(self.path)!r} could not be written")

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        file = self._file
        if file is not None:
            self._length, self._digest = file.length, file.digest
        if self._length:
            state["file"] = {
                "length": self._length,
                "sha256": self._digest,
                "iteration": self._last_iteration,
                "lines": self._last_lines,
            }
        return state

    def sync_written(self) -> None:
        """Flush all records to disk, before a checkpoint with this state refers to them."""
        self._check_place()
        if self._file is not None:
            with self._path_in_errors():
                self._file.sync()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._close()
        file = state.get("file", {"length": 0, "sha256": "", "iteration": 0, "lines": ""})
        self._length, self._digest = file["length"], file["sha256"]
        self._last_iteration, self._last_lines = file["iteration"], file["lines"]
