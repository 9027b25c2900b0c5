"""TensorBoard logs: losses, metrics and learning rates, written by tensorboardX."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from tensorboardX import FileWriter, RecordWriter, SummaryWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from signalfire import Engine, Events, Interval, Phase, on
from signalfire.acts import Override

from ._common.folders import check_folder, open_folder
from ._common.scalars import Record, ScalarLogger

__all__ = ["TensorBoardLogger"]

_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\.(?:(\d{9})\.)?")
_FLUSH_SECONDS = 30  # a killed process loses at most this much


class TensorBoardLogger(ScalarLogger):
    """Writes losses, scalar metrics and the learning rates of the steps as TensorBoard scalars.

    The horizontal axis is the iteration. For one clean curve, a resumed run hides what an earlier run logged after its starting
    point, and a new training run hides all of it; the earlier files are kept. The file is closed when the run ends, also after
    an exception, and flushed to disk before a checkpoint refers to it.

    Args:
        folder: TensorBoard's log folder, created if it does not exist.
        every: Interval of losses and learning rates, in iterations, such as "10it". Each new value of a metric is written in
            the iteration in which it was measured, and after evaluations and epochs.

    Example:
        >>> TensorBoardLogger("runs/digits", every="50it").name
        'tensorboard'
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, every: str | Interval = "10it", name: str | None = None
    ) -> None:
        super().__init__(every=every, name="tensorboard" if name is None else name)
        self.folder = check_folder(self, folder)
        self._writer: _Writer | None = None
        self._purge_from: int | None = None  # the step from which TensorBoard purges the entries of other files
        self._running = False
        self._last: dict[str, float] = {}  # the values written at the last step
        self._last_step = 0

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Override.FILE, by=self, target=f"events in {os.path.abspath(self.folder)!r}")

    @property
    def writer(self) -> SummaryWriter | None:
        """The tensorboardX writer during a run, for entries of your own; None otherwise."""
        if not self._running:
            return None
        engine = self.engine
        return self._open(purge=engine is not None and engine.state.epoch > 0)

    @on(Events.STARTED, phase=Phase.RECORD, reads=["metrics"], writes=["files"])
    def begin(self, engine: Engine) -> None:
        super().begin(engine)
        self._running = True
        open_folder(self, self.folder)
        new_run = engine.state.iteration == 0
        if not new_run:
            self._purge_from = engine.state.iteration + 1
        elif engine.training and any("tfevents" in file for file in os.listdir(self.folder)):
            self._purge_from = 0
        else:
            self._purge_from = None

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD, reads=[], writes=["files"])
    def resume(self, engine: Engine) -> None:
        """Purge what the stopped run wrote from the loaded iteration on, and write the checkpoint's last values again."""
        known = self._seen_loaded
        super().resume(engine)
        iteration = engine.state.iteration
        self._purge_from = iteration if known else iteration + 1
        if known and self._last and self._last_step == iteration:
            for tag, value in self._last.items():
                self._open().add_scalar(tag, value, self._last_step)

    def _open(self, *, purge: bool = True) -> _Writer:
        opened = self._writer is None
        if self._writer is None:
            self._writer = _Writer(str(self.folder))
        if purge and self._purge_from is not None:
            # Keep the user's own entries from before the first batch.
            self._writer.purge_from(self._purge_from if opened else max(self._purge_from, 1))
            self._purge_from = None
        return self._writer

    def record(self, record: Record) -> None:
        """Write the values as scalars."""
        if record.iteration != self._last_step:
            self._last, self._last_step = {}, record.iteration
        self._last.update(record.values)
        for tag, value in record.values.items():
            self._open().add_scalar(tag, value, record.iteration)

    @on(Events.ENDED, phase=Phase.PERSIST, reads=["metrics"], writes=["files"])
    def close(self, engine: Engine) -> None:
        """Flush and close the file."""
        super().close(engine)
        self._running = False
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._writer is not None:
            self._writer.flush()
        return state | ({"step": self._last_step, "values": dict(self._last)} if self._last else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._last_step, self._last = (state["step"], dict(state["values"])) if "step" in state else (0, {})


def _latest(folder: str) -> int:
    """The time in the name of the last event file of a folder, in ns; 0 without one."""
    with suppress(OSError):
        names = [_EVENT_FILE.match(name) for name in os.listdir(folder)]
        return max((int(m[1]) * 10**9 + int(m[2] or 10**9) for m in names if m is not None), default=0)
    return 0


class _EventFile:
    """tensorboardX's event file without its thread, in which a full disk would go unnoticed and hang the run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.failed = False
        self.flushed = time.monotonic()
        # TensorBoard reads the files in the order of their names; two files of one name would lose events. The clock may have
        # been set back since the last file.
        seconds, nanoseconds = divmod(max(time.time_ns(), _latest(folder) + 1), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{uuid.uuid4().hex[:8]}"
        with self._path_in_errors():
            self.file = RecordWriter(os.path.join(folder, name))
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def get_logdir(self) -> str:
        return self.folder

    def add_event(self, event: Event) -> None:
        with self._path_in_errors():
            self.file.write(event.SerializeToString())
        if time.monotonic() - self.flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self.flushed = time.monotonic()
        if not self.failed:
            with self._path_in_errors():
                self.file.flush()

    def close(self) -> None:
        with suppress(OSError) if self.failed else self._path_in_errors():
            self.file.close()

    @contextmanager
    def _path_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed = True
            error.add_note(f"TensorBoardLogger: the events could not be written to {self.folder!r}")
            raise


class _FileWriter(FileWriter):  # type: ignore[misc]
    def __init__(self, folder: str) -> None:
        self.event_writer = _EventFile(folder)
        self._default_metadata: dict[str, Any] = {}


class _Writer(SummaryWriter):  # type: ignore[misc]
    """tensorboardX's writer, but writing in the run's own thread."""

    file_writer: _FileWriter | None

    def _get_file_writer(self) -> _FileWriter:
        if self.file_writer is None:
            self.file_writer = _FileWriter(self.logdir)
            self.all_writers = {self.logdir: self.file_writer}
        return self.file_writer

    def purge_from(self, step: int) -> None:
        """Make TensorBoard purge earlier entries with this step or a greater one."""
        self._get_file_writer().add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)
