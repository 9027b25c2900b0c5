"""Base of the loggers that send a run to a tracking service: MLflow, Weights & Biases, Trackio, or your own service."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from signalfire import Engine, Events, Interval, Phase, on
from signalfire.authoring import check_bool, check_int, check_name, check_number, warn

from .claims import FILE
from .event_files import drawn, png
from .folders import check_folder, open_folder
from .kept_file import Item, KeptFile, Kind
from .scalars import Record, ScalarLogger
from .sender import Sender, Status, Stored

__all__ = ["Item", "RemoteLogger", "Status", "Stored"]


class RemoteLogger(ScalarLogger):
    """Sends losses, learning rates, metrics and values from ``engine.log`` to a service, and never slows or ends a run.

    The run only puts its records into a queue, and one thread sends them. A failure is reported once. Records wait in memory, and
    then in a file of JSON lines, ``<name>-unsent.jsonl`` in ``folder``, until the service answers again. Records left when the
    run ends stay in that file; a resumed run sends them, and so does `send_kept`.

    A run that is stopped or killed at any point and resumes from a checkpoint continues the same remote run, in which no value
    is lost or duplicated: the service's values after the checkpoint are compared with those that the resumed run logs. If they
    differ, because the run was resumed with different options or set back to an earlier state (``engine.snapshots.restore``),
    the run continues as a new remote run, whose id has a suffix, ``-1``, with a copy of the earlier numbers. The old run is
    closed as KILLED with a text that gives the reason, and keeps its images and texts. Metrics that measure the machine, such
    as those of `Throughput`, may differ.

    The remote run is FINISHED, FAILED with the error's text, KILLED after Ctrl-C, or still RUNNING after a preemption. With
    several ranks, rank 0 sends one run. The horizontal axis is the iteration, and names are the same as in TensorBoard.

    A logger for your own service defines `open`, `send`, and usually `stored` and `close_run`. They are called in the thread,
    never at the same time. They may raise any error, and are then called again later.

    Args:
        folder: Folder of the run, for the file of unsent records.
        every: Interval in iterations, such as "10it", for losses, learning rates and per-iteration metrics. All other new metric
            values are sent with the iteration that measured them.
        run_id: Id of the remote run: letters, digits, '_' and '-'. By default, every run that starts over has its own.
        keep_different: Whether to keep different values in the remote run and to continue after them, instead of starting a new
            remote run. Use this for nondeterministic training, where a resumed run does not repeat the last digits.
        capacity: Number of rows that wait in memory.
        timeout: Seconds to wait for unsent records when the run ends.

    Attributes:
        needs: Modules of the client, and the extra of this package that installs them.
        backoff: Seconds to wait after a failure, doubled with each further failure, and their maximum.

    Raises:
        ImportError: If the client is not installed.

    Example:
        >>> class Printed(RemoteLogger):
        ...     def open(self, run_id, hyperparameters):
        ...         print("open", dict(hyperparameters))
        ...
        ...     def send(self, items):
        ...         for item in items:
        ...             print(item.iteration, item.kind, sorted(item.values))
        ...
        ...     def close_run(self, status, error):
        ...         print(status)
        >>> import tempfile, torch
        >>> from signalfire import Engine, Update
        >>> model = torch.nn.Linear(2, 1)
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     engine = Engine(update, model=model)
        ...     engine.log.hyperparameters(width=2)
        ...     handle = engine.attach(Printed(folder, every="2it"))
        ...     state = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 4, max_epochs=1)
        open {'width': 2}
        2 numbers ['lr', 'train/loss']
        4 numbers ['lr', 'train/loss']
        FINISHED
    """

    needs: ClassVar[tuple[Sequence[str], str]] = ((), "")
    backoff: ClassVar[tuple[float, float]] = (0.5, 30.0)

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: str | Interval = "10it",
        run_id: str | None = None,
        keep_different: bool = False,
        capacity: int = 1000,
        timeout: float = 30.0,
        name: str | None = None,
    ) -> None:
        super().__init__(every=every, name=name)
        self.given_id = check_name(self, "run_id", run_id)
        self.keep_different = check_bool(self, "keep_different", keep_different)
        self.capacity = check_int(self, "capacity", capacity)
        self.timeout = check_number(self, "timeout", timeout, least=0)
        self._sender: Sender | None = None  # during a run
        self._run = ""  # id of the run, without a suffix
        self._forks = 0  # the suffix
        self._items = 0  # how many the run has given so far
        self._at = 0  # the iteration of the last item, ...
        self._there: list[Iterable[str]] = []  # ... and the names that it has
        self._reported = False
        if self.given_id is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", self.given_id):
            raise ValueError(f"{type(self).__name__}(run_id={run_id!r}): expected only letters, digits, '_' and '-'")
        self.folder = check_folder(self, folder)
        modules, extra = self.needs
        if missing := [module for module in modules if find_spec(module) is None]:
            raise ImportError(
                f"{type(self).__name__}: {missing[0]} is not installed; install the extra: pip install signalfire[{extra}]"
            )

    # ---- what a service defines -----------------------------------------------------------------------------------

    def open(self, run_id: str, hyperparameters: Mapping[str, Any]) -> None:
        """Create or continue the remote run with this id, and write the hyperparameters; also called for new hyperparameters."""
        raise NotImplementedError(f"{type(self).__name__} does not define open()")

    def send(self, items: Sequence[Item]) -> None:
        """Send items; each has numbers, or an image, a text or a histogram."""
        raise NotImplementedError(f"{type(self).__name__} does not define send()")

    def stored(self, run_id: str, after: int) -> Iterable[Stored]:
        """The remote run's values of this and later iterations: names, iterations, and numbers, or None for a value that is not
        a number.

        Without this method, a killed run may send values again, and a new remote run has no copy of earlier numbers.
        """
        return ()

    def confirmed(self) -> int | None:
        """Number of items sent since `open` that the client cannot lose if the process is killed; None for all."""
        return None

    def close_run(self, status: Status, error: str | None) -> None:
        """End the remote run; RUNNING if it will be continued."""

    def clean(self, name: str) -> str:
        """A name as the service accepts it."""
        return name

    def as_stored(self, value: float) -> float:
        """A number as the service returns it."""
        return value

    # ---- the run --------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The file of unsent records."""
        return self.folder / f"{self.name}-unsent.jsonl"

    @property
    def remote_id(self) -> str:
        """Id of the remote run; empty before the first run."""
        if self._sender is not None:
            return self._sender.remote_id
        return f"{self._run}-{self._forks}" if self._forks else self._run

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(FILE, by=self, target=repr(os.path.abspath(self.path)))

    @on(Events.STARTED, phase=Phase.RECORD, reads=["metrics"], writes=["files"])
    def begin(self, engine: Engine) -> None:
        """Open the remote run, or wait for the state that continues one."""
        super().begin(engine)
        open_folder(self, self.folder)
        self._reported = False
        if not engine.snapshots.has_loaded_state:
            if engine.state.iteration == 0:
                self._run = ""
            self._start(engine)

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD, reads=[], writes=["files"])
    def resume(self, engine: Engine) -> None:
        """Continue the remote run from where the state was taken."""
        super().resume(engine)
        if self._sender is None:
            self._start(engine)
        else:
            self._sender.go_back(self._items, engine.state.iteration)

    def _start(self, engine: Engine) -> None:
        if not self._run:
            self._run, self._forks = self.given_id or engine.snapshots.run_id, 0
            self._items, self._at, self._there = 0, 0, []
        parameters = dict(engine.log.given)
        kept = self._open_kept({"run": self._run, "forks": self._forks, "hyperparameters": parameters})
        self._sender = Sender(self, kept, engine.state.iteration)
        self._sender.start()

    def _open_kept(self, header: Mapping[str, Any]) -> KeptFile:
        """The file of unsent records from an earlier process of this run; a file of a different run is put aside."""
        kept = KeptFile(self.path, header)
        if not self.path.exists():
            return kept
        try:
            found, items = KeptFile.load(self.path)
        except ValueError:
            found, items = {}, []
        if found.get("run") == header["run"]:
            if items := [item for item in items if item.number <= self._items]:
                kept.replace(items)
            else:
                kept.remove()
            return kept
        count = itertools.count(1)
        aside = next(one for one in (self.path.with_suffix(f".{i}.jsonl") for i in count) if not one.exists())
        self.path.rename(aside)
        if items:
            warn(
                f"{self.name!r}: {len(items)} rows of run {found['run']!r} were never sent and are now in "
                f"{str(aside)!r}; send them with {type(self).__name__}(...).send_kept({str(aside)!r})"
            )
        return kept

    def record(self, record: Record) -> None:
        """Put a row into the queue."""
        self._put("numbers", record.epoch, record.iteration, record.step, record.values)

    def _put(self, kind: Kind, epoch: int, iteration: int, step: int, values: Mapping[str, Any]) -> None:
        if (sender := self._sender) is None:
            return
        if iteration != self._at:
            self._at, self._there = iteration, []
        before = Counter(itertools.chain(*self._there)) if self._there else _NONE
        self._there.append(values)
        self._items += 1
        sender.put(Item(self._items, epoch, iteration, step, time.time(), kind, values, before))
        if sender.problem is not None and not self._reported:
            self._reported = True
            warn(
                f"{self.name!r}: the rows of run {sender.remote_id!r} cannot be sent: {sender.problem}; training "
                "continues, the rows are kept, and the handler retries"
            )

    def _put_entry(self, engine: Engine, kind: Kind, convert: Callable[[Any], Any]) -> None:
        tag, value = self.converted(engine, convert)
        if value is not None:
            state = engine.state
            self._put(kind, state.epoch, state.iteration, engine.updates[0].steps, {tag: value})

    @on(Events.IMAGE_LOGGED, phase=Phase.RECORD, reads=["step", "metrics"], writes=["files"])
    def write_image(self, engine: Engine) -> None:
        """Send an image."""
        self._put_entry(engine, "image", png)

    @on(Events.FIGURE_LOGGED, phase=Phase.RECORD, reads=["step", "metrics"], writes=["files"])
    def write_figure(self, engine: Engine) -> None:
        """Send a figure as an image, drawn at once: it may be changed or closed afterwards."""
        self._put_entry(engine, "image", lambda figure: png(drawn(figure)))

    @on(Events.TEXT_LOGGED, phase=Phase.RECORD, reads=["step", "metrics"], writes=["files"])
    def write_text(self, engine: Engine) -> None:
        """Send a text."""
        self._put_entry(engine, "text", str)

    @on(Events.HISTOGRAM_LOGGED, phase=Phase.RECORD, reads=["step", "metrics"], writes=["files"])
    def write_histogram(self, engine: Engine) -> None:
        """Send a histogram."""
        self._put_entry(engine, "histogram", lambda histogram: [histogram.counts, histogram.edges])

    @on(Events.HYPERPARAMETERS_LOGGED, phase=Phase.RECORD, reads=[], writes=["files"])
    def write_hyperparameters(self, engine: Engine) -> None:
        """Send the hyperparameters logged during a run; others are sent when it starts."""
        if self._sender is not None:
            self._sender.set_parameters(engine.log.given)

    @on(Events.ENDED, phase=Phase.PERSIST, reads=["error", "metrics"], writes=["files"])
    def close(self, engine: Engine) -> None:
        """Close the remote run once everything is sent; after the timeout, unsent records stay in the file."""
        super().close(engine)
        sender, self._sender = self._sender, None
        if sender is None:
            return
        left = sender.finish(*_ending(engine), self.timeout)
        self._forks = sender.forks
        if not sender.done.is_set():
            why = f" ({sender.problem})" if sender.problem else ""
            warn(
                f"{self.name!r}: run {sender.remote_id!r} could not be closed within {self.timeout:g} s{why}; {left} "
                f"unsent rows are in {str(self.path)!r}; to send them, resume the run, or call "
                f"{type(self).__name__}(...).send_kept()"
            )

    def send_kept(self, path: str | os.PathLike[str] | None = None) -> int:
        """Send the unsent records of an earlier run, and close that run; returns the number of rows.

        Args:
            path: its file, if it is not the one that this logger would write.

        Raises:
            RuntimeError: during a run.
            TimeoutError: if the service does not accept all rows within ``timeout``; the file stays.
        """
        if self._sender is not None:
            raise RuntimeError(
                f"{type(self).__name__}.send_kept() was called during a run, but a run sends the kept rows itself; "
                "call send_kept() only outside a run"
            )
        path = self.path if path is None else Path(path)
        if not path.exists():
            return 0
        header, items = KeptFile.load(path)
        kept = KeptFile(path, header)
        kept.replace(items)
        sender = Sender(self, kept, items[-1].iteration if items else 0)
        sender.start()
        left = sender.finish(header.get("status", "RUNNING"), header.get("error"), self.timeout)
        if not sender.done.is_set():
            raise TimeoutError(f"{type(self).__name__}: {left} rows of {str(path)!r} were not sent: {sender.problem}")
        return len(items)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._sender is not None:
            self._sender.keep()
            self._forks = self._sender.forks
        if self._run:
            state["run"] = {"id": self._run, "forks": self._forks, "items": self._items}
            state["at"] = {"iteration": self._at, "names": dict(Counter(itertools.chain(*self._there)))}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        run = state.get("run", {"id": "", "forks": 0, "items": 0})
        at = state.get("at", {"iteration": 0, "names": {}})
        if self._sender is None:
            self._run, self._forks = run["id"], run["forks"]
        self._items, self._at = run["items"], at["iteration"]
        self._there = [list(Counter(at["names"]).elements())] if at["names"] else []

    # ---- what the thread asks -------------------------------------------------------------------------------------

    def as_sent(self, item: Item) -> Item:
        """An item with the names and numbers of the service."""
        values = {
            self.clean(name): self.as_stored(value) if item.kind == "numbers" else value
            for name, value in item.values.items()
        }
        return item._replace(values=values, before={self.clean(name): count for name, count in item.before.items()})

    def is_measured(self, name: str) -> bool:
        """Whether a value measures the machine, so no run repeats it."""
        engine = self.engine
        return engine is not None and name in {
            self.clean(self.tag_of(engine, metric)) for metric in list(engine.state.metrics.unsaved)
        }


_NONE: Mapping[str, int] = {}


def _ending(engine: Engine) -> tuple[Status, str | None]:
    """How a run has ended."""
    error = engine.state.exception
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", None
    if error is not None:
        return "FAILED", f"{type(error).__name__}: {error}"
    return ("RUNNING" if engine.boundary.preempted else "FINISHED"), None
