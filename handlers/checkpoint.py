"""Checkpoints on disk: the last ones, or the best by a metric."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from signalfire import (
    AnyEvent,
    Engine,
    Events,
    Handler,
    Interval,
    Monitor,
    Phase,
    check_every,
    check_int,
    on,
    unfiltered,
)

from .folders import check_folder, open_folder
from .ranks import DECIDE_CHECKPOINTS

__all__ = ["Checkpoint"]


class Checkpoint(Handler):
    """Writes the engine's whole state to a file, and keeps the last ones, or the best by a metric.

    Every file holds everything that is needed to go on (`Engine.state_dict`), and several Checkpoints share one snapshot. A
    new file is written aside, synced, and renamed into place before an old one goes, so that a crash at any moment
    leaves the old ones whole. The names are ``<name>-epoch0003-iter00000120.pt``.

    The best are chosen once for each new value of the metric: NaN is never kept, and of equal values the earlier one stays.

    Args:
        folder: where to write; made if it is not there.
        monitor: the metric by which the best are kept; without it the last ones are kept.
        mode: "min" if smaller is better, "max" if greater is.
        keep: how many files are kept.
        every: without monitor, the interval.

    Attributes:
        kept: the files that are kept, with their values: the best first, or the oldest first.

    Example:
        >>> import tempfile
        >>> Checkpoint(tempfile.mkdtemp(), monitor="accuracy", mode="max", keep=3, name="best").keep
        3
    """

    trains = True

    writes = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep: int = 1,
        every: str | Interval | AnyEvent | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if monitor is not None and every is not None:
            raise ValueError(
                f"Checkpoint(monitor={monitor!r}, every={every!r}): the best are chosen at each new value of the "
                "metric; leave out every="
            )
        self.folder = check_folder(self, folder)
        self.monitor = None if monitor is None else Monitor("Checkpoint", monitor, mode)
        self.keep = check_int(self, "keep", keep)
        self.every = check_every(self, every or "1ep") if monitor is None else None
        self.watching = None if monitor is None else Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED
        self.requiring = None if monitor is None else Events.EPOCH_COMPLETED
        self.saving = self.watching or unfiltered(self.every or "1ep")
        self.kept: list[tuple[str, float | None]] = []
        self._due: str | None = None  # the file that was decided on in CONTROL and is written in PERSIST
        self._superseded: list[str] = []

    @property
    def best(self) -> Path | None:
        """The file with the best value of the metric; None before the first, or without monitor."""
        return self.folder / self.kept[0][0] if self.kept and self.monitor is not None else None

    @property
    def last(self) -> Path | None:
        """The newest of the files that are kept; None before the first."""
        newest = max(
            (file for file, _ in self.kept), key=lambda file: int(file[:-3].rpartition("-iter")[2]), default=None
        )
        return None if newest is None else self.folder / newest

    @staticmethod
    def load(path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read a checkpoint for ``engine.load_state_dict``. Nothing in the file can run code."""
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            raise ValueError(
                f"Checkpoint.load({str(path)!r}): this is not a whole checkpoint: {type(error).__name__}: {error}"
            ) from error
        return state

    @on(Events.STARTED, phase=Phase.PREPARE)
    def open(self, engine: Engine) -> None:
        """Make the folder, so that a place that cannot be written shows before the first batch."""
        self._due = None  # what an error kept from being written is not written under its old name
        open_folder(self, self.folder)

    @on("every", phase=Phase.CONTROL, rank=DECIDE_CHECKPOINTS)
    def decide(self, engine: Engine) -> None:
        """Decide to write, and which file goes for it."""
        file = self._file(engine)
        self.kept = [kept for kept in self.kept if kept[0] != file] + [(file, None)]
        self._keep(file, self.kept[-self.keep :])

    @on("watching", phase=Phase.CONTROL, rank=DECIDE_CHECKPOINTS)
    def decide_by_metric(self, engine: Engine) -> None:
        """Decide to write if the metric's new value is one of the best."""
        assert self.monitor is not None
        value = self.monitor.new_value(engine)
        if value is None:
            return
        file = self._file(engine)
        self.kept = [kept for kept in self.kept if kept[0] != file]  # a second new value in one iteration
        place = next((i for i, (_, other) in enumerate(self.kept) if self.monitor.better(value, other)), len(self.kept))
        if place < self.keep and value == value:
            self._keep(file, [*self.kept[:place], (file, value), *self.kept[place:]][: self.keep])

    @on("requiring", phase=Phase.CONTROL)
    def require(self, engine: Engine) -> None:
        """Refuse a metric that does not exist."""
        assert self.monitor is not None
        self.monitor.require(engine)

    def _file(self, engine: Engine) -> str:
        return f"{self.name}-epoch{engine.state.epoch:04d}-iter{engine.state.iteration:08d}.pt"

    def _keep(self, file: str, kept: list[tuple[str, float | None]]) -> None:
        stays = {name for name, _ in kept}
        self._superseded += [name for name, _ in self.kept if name not in stays]
        self.kept = kept
        self._due = file

    @on("saving", phase=Phase.PERSIST)
    def save(self, engine: Engine) -> None:
        """Write what was decided, and only then remove what it supersedes."""
        if self._due is None:
            return
        file, self._due = self._due, None
        try:
            write(engine.snapshot(), self.folder / file)
        except BaseException:
            self.kept = [kept for kept in self.kept if kept[0] != file]
            raise
        superseded, self._superseded = self._superseded, []
        for name in superseded:
            (self.folder / name).unlink(missing_ok=True)
        engine.tell_saved()

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(kept) for kept in self.kept], "monitor": self.monitor and self.monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = [(file, value) for file, value in state["kept"]]
        if self.monitor is not None:
            self.monitor.load_state_dict(state["monitor"])


def write(state: Mapping[str, Any], path: Path) -> None:
    """Write a state so that at any moment, also of a crash, ``path`` is either whole or not there."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        # Through memory: torch turns what a file raises, a full disk or Ctrl-C, into an error that says nothing of it.
        content = io.BytesIO()
        torch.save(dict(state), content)
        with open(aside, "wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        error.add_note(f"while writing the checkpoint {str(path)!r}; the earlier ones are untouched")
        raise
