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

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, check_every, on

from .folders import check_folder, open_folder

__all__ = ["TensorBoardLogger"]

_FLUSH_SECONDS = 30  # what a killed process would lose at most


class TensorBoardLogger(Handler):
    """Writes losses, metrics that are one number, and the learning rates that were used, as TensorBoard scalars.

    The horizontal axis is the iteration. A run that continues cuts off what an earlier one wrote after its starting point, so
    that there is one clean curve. The file is closed, and so complete, when the run ends, also by an exception.

    Args:
        folder: TensorBoard's log folder; made if it is not there.
        every: the interval of losses and learning rates, in iterations, such as "10it"; new values of metrics are written
            after every evaluation and every epoch.

    Example:
        >>> TensorBoardLogger("runs/digits", every="50it").name
        'tensorboard'
    """

    writes = True

    def __init__(
        self, folder: str | os.PathLike[str], *, every: str | Interval = "10it", name: str | None = None
    ) -> None:
        super().__init__(name=name or "tensorboard")
        self.folder = check_folder(self, folder)
        self.every = check_every(self, every, units=["it"])
        self.rates_used: AnyEvent = Events.OPTIMIZER_STEP_STARTED(every=int(self.every.value))
        self._writer: SummaryWriter | None = None
        self._rates: dict[str, float] = {}
        self._rates_at = 0
        self._seen: dict[str, int] = {}
        self._first = 1
        self._running = False
        self._last: dict[str, float] = {}  # what was written at the last step at which something was
        self._last_step = 0

    @property
    def writer(self) -> SummaryWriter | None:
        """The tensorboardX writer while a run is going on, for entries of your own; None otherwise."""
        return self._open() if self._running else None

    @on(Events.STARTED, phase=Phase.RECORD)
    def begin(self, engine: Engine) -> None:
        """What was measured up to here was written by the run before."""
        self._running = True
        open_folder(self, self.folder)
        self._seen = dict(engine.state.metrics.serials)
        self._first = engine.state.iteration + 1

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD)
    def go_on(self, engine: Engine) -> None:
        """What the stopped run wrote from the loaded iteration on is cut off; what the checkpoint knows of, written again."""
        self.begin(engine)
        if self._last and self._last_step == engine.state.iteration:
            self._first = engine.state.iteration
            for tag, value in self._last.items():
                self._open().add_scalar(tag, value, self._last_step)

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            self._writer = _Writer(str(self.folder), purge_step=self._first if self._first > 1 else None)
        return self._writer

    def _add(self, tag: str, value: float, step: int) -> None:
        if step != self._last_step:
            self._last, self._last_step = {}, step
        self._last[tag] = value
        self._open().add_scalar(tag, value, step)

    @on("rates_used", phase=Phase.RECORD)
    def note_rates(self, engine: Engine) -> None:
        """Note the rates before a schedule moves them: those are the ones that are used."""
        self._rates_at = engine.state.iteration
        self._rates.update(_rates(engine, engine.state.update.name))

    @on("every", phase=Phase.RECORD)
    def write_loss(self, engine: Engine) -> None:
        """Write the losses and the rates."""
        iteration = engine.state.iteration
        several = len(engine.updates) > 1
        if self._rates_at != iteration:  # inside a window: the rates are those of the step to come
            self._rates = {}
        for update in engine.updates:
            if update.loss is not None:
                self._add(f"loss/{update.name}" if several else "loss", update.loss.item(), iteration)
            for tag, rate in _rates(engine, update.name).items():
                self._add(tag, self._rates.get(tag, rate), iteration)

    @on(Events.EVALUATION_COMPLETED | Events.EPOCH_COMPLETED | Events.COMPLETED, phase=Phase.RECORD)
    def write_metrics(self, engine: Engine) -> None:
        """Write the metrics that are new."""
        metrics = engine.state.metrics
        for name, value in metrics.numbers_since(self._seen).items():
            self._add(f"metrics/{name}", value, engine.state.iteration)
        self._seen = dict(metrics.serials)

    @on(Events.ENDED, phase=Phase.PERSIST)
    def close(self, engine: Engine) -> None:
        """Close the file; a killed process would lose what was not flushed."""
        self._running = False
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._last_step, "values": dict(self._last)} if self._last else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_step, self._last = (state["step"], dict(state["values"])) if state else (0, {})


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
            if self.purge_step is not None:  # TensorBoard then forgets what other files have from this step on
                start = SessionLog(status=SessionLog.START)
                self.file_writer.add_event(Event(session_log=start), self.purge_step)
        return self.file_writer


def _rates(engine: Engine, update: str) -> dict[str, float]:
    optimizer = engine.find_update(update).optimizer
    groups = [] if optimizer is None else optimizer.param_groups
    prefix = "learning_rate" if len(engine.updates) == 1 else f"learning_rate/{update}"
    return {prefix if len(groups) == 1 else f"{prefix}/group{i}": float(group["lr"]) for i, group in enumerate(groups)}
