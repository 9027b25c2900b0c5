"""TensorBoard through tensorboardX: losses, metrics and learning rates."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from tensorboardX import FileWriter, RecordWriter, SummaryWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from signalfire import Engine, Events, Interval, Phase, on

from ._common.folders import check_folder, open_folder
from ._common.scalars import Record, ScalarLogger

__all__ = ["TensorBoardLogger"]

_FLUSH_SECONDS = 30  # what a killed process would lose at most


class TensorBoardLogger(ScalarLogger):
    """Writes losses, metrics that are one number, and the learning rates that were used, as TensorBoard scalars.

    The horizontal axis is the iteration. A run that continues cuts off what an earlier one wrote after its starting point, and
    a training that begins anew all of it, so that there is one clean curve; the earlier files stay. The file is closed, and so
    complete, when the run ends, also by an exception; what a checkpoint knows of is on the disk before the checkpoint is.

    Args:
        folder: TensorBoard's log folder; made if it is not there.
        every: the interval of losses and learning rates, in iterations, such as "10it"; new values of metrics are written
            after every evaluation and every epoch.

    Example:
        >>> TensorBoardLogger("runs/digits", every="50it").name
        'tensorboard'
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, every: str | Interval = "10it", name: str | None = None
    ) -> None:
        super().__init__(every=every, name=name or "tensorboard")
        self.folder = check_folder(self, folder)
        self._writer: _Writer | None = None
        self._cut_from: int | None = None  # the step from which on TensorBoard has to forget what other files hold
        self._running = False
        self._last: dict[str, float] = {}  # what was written at the last step at which something was
        self._last_step = 0

    @property
    def writer(self) -> SummaryWriter | None:
        """The tensorboardX writer while a run is going on, for entries of your own; None otherwise."""
        if not self._running:
            return None
        engine = self.engine
        return self._open(cut=engine is not None and engine.state.epoch > 0)

    @on(Events.STARTED, phase=Phase.RECORD)
    def begin(self, engine: Engine) -> None:
        super().begin(engine)
        self._running = True
        open_folder(self, self.folder)
        anew = engine.state.iteration == 0
        if not anew:
            self._cut_from = engine.state.iteration + 1
        elif engine.training and any("tfevents" in file for file in os.listdir(self.folder)):
            self._cut_from = 0
        else:
            self._cut_from = None

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD)
    def resume(self, engine: Engine) -> None:
        """What the stopped run wrote from the loaded iteration on is cut off; what the checkpoint knows of, written again."""
        known = self._seen_loaded
        super().resume(engine)
        iteration = engine.state.iteration
        self._cut_from = iteration if known else iteration + 1
        if known and self._last and self._last_step == iteration:
            for tag, value in self._last.items():
                self._open().add_scalar(tag, value, self._last_step)

    def _open(self, *, cut: bool = True) -> _Writer:
        opened = self._writer is None
        if self._writer is None:
            self._writer = _Writer(str(self.folder))
        if cut and self._cut_from is not None:
            # Entries of the user's own, made before the first batch, are to stay.
            self._writer.cut_from(self._cut_from if opened else max(self._cut_from, 1))
            self._cut_from = None
        return self._writer

    def record(self, record: Record) -> None:
        """Write the values as scalars."""
        if record.iteration != self._last_step:
            self._last, self._last_step = {}, record.iteration
        self._last.update(record.values)
        for tag, value in record.values.items():
            self._open().add_scalar(tag, value, record.iteration)

    @on(Events.ENDED, phase=Phase.PERSIST)
    def close(self, engine: Engine) -> None:
        """Close the file; a killed process would lose what was not flushed."""
        super().close(engine)
        self._running = False
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        if self._writer is not None:
            self._writer.flush()
        last = {"step": self._last_step, "values": dict(self._last)} if self._last else {}
        return super().state_dict() | last

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._last_step, self._last = (state["step"], dict(state["values"])) if "step" in state else (0, {})


class _EventFile:
    """tensorboardX's event file without its thread, in which a full disk would end the writing unseen and hang the run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.failed = False
        self.flushed = time.monotonic()
        # TensorBoard reads the files in the order of their names; two of one name would lose events.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{uuid.uuid4().hex[:8]}"
        with self._told():
            self.file = RecordWriter(os.path.join(folder, name))
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def get_logdir(self) -> str:
        return self.folder

    def add_event(self, event: Event) -> None:
        with self._told():
            self.file.write(event.SerializeToString())
        if time.monotonic() - self.flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self.flushed = time.monotonic()
        if not self.failed:
            with self._told():
                self.file.flush()

    def close(self) -> None:
        with suppress(OSError) if self.failed else self._told():
            self.file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
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
    """tensorboardX's writer, which writes in the run's own thread."""

    file_writer: _FileWriter | None

    def _get_file_writer(self) -> _FileWriter:
        if self.file_writer is None:
            self.file_writer = _FileWriter(self.logdir)
            self.all_writers = {self.logdir: self.file_writer}
        return self.file_writer

    def cut_from(self, step: int) -> None:
        """Let TensorBoard forget what was written before with this step or a greater one."""
        self._get_file_writer().add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)
