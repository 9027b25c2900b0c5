"""Makes the runs of a study: builds each, applies its variant and runs it."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils.data import TensorDataset

from signalfire import Engine, Events, Handler, Phase, seed_everything
from signalfire.authoring.batches import tensors_in
from signalfire.authoring.randomness import unchanged_random_state
from signalfire.core.state import as_numbers

from .beginnings import last_values_of
from .composition import digests_of_parts, writes_or_shows
from .contents import digest_of
from .results import MOST_POINTS
from .shared import Left, SharedError, check_new, check_not_left

__all__ = [
    "Build",
    "Outcome",
    "Run",
    "Task",
    "beginnings_of",
    "compose",
    "digest",
    "exchange",
    "make",
    "one_thread",
]

Run = Callable[[Engine], object]
Build = Callable[..., Engine | tuple[Engine, Run]]

_run_lock = threading.Lock()  # runs of one process share its global generators, so they run one at a time


@dataclass(frozen=True)
class Task:
    """The specification of a run, sent to worker processes.

    Attributes:
        build, run, streams, files: Arguments of the study.
        seed: Seed of the run.
        off: Names of the handlers that are switched off.
        swaps: For each replaced handler, its name and the factory of the alternative.
        nonce: Makes repeated attempts distinct, for executors that cache the results of equal calls.
        until: Epoch after which the run ends, with the metrics that it has then.
        predict: Called with the engine once the run has ended; what it returns is in the outcome.
    """

    build: Build
    run: Run | None
    streams: Literal["shared", "separate"] | None
    files: bool
    seed: int
    off: tuple[str, ...] = ()
    swaps: tuple[tuple[str, Callable[[], Handler]], ...] = ()
    nonce: str = ""
    until: int | None = None
    predict: Callable[[Engine], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        error: Traceback if the run failed.
        handlers: Names of the enabled handlers.
        metrics: All scalar metrics.
        announced: Names of all metrics that were set or announced.
        steps, seconds, memory: As in `Result`.
        begins: Digests of the weights that build returned and of the data that the run began with, where they can be known.
        history: For each metric, pairs of an epoch and the value at its end; see `Result`.
        predictions: What the task's function returned, packed as plain values; None without.
        epoch: The last epoch of the run.
        last_values: Names of the metrics that functions have written in each batch.
        composed: Digests of the handlers, the updates and the function that build made, with their settings.
    """

    error: str | None = None
    handlers: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    announced: tuple[str, ...] = ()
    steps: int = 0
    seconds: float = 0.0
    memory: int = 0
    begins: tuple[str, ...] = ()
    history: dict[str, list[list[float]]] = field(default_factory=dict)
    predictions: dict[str, Any] | None = None
    epoch: int = 0
    last_values: tuple[str, ...] = ()
    composed: dict[str, str] = field(default_factory=dict)


def compose(
    build: Build, run: Run | None, streams: Literal["shared", "separate"] | None, files: bool, seed: int
) -> tuple[Engine, Run]:
    """Seed the global generators and build an engine and the function that runs it.

    Without ``files``, handlers that write or show anything are disabled.

    Raises:
        TypeError: if ``build`` returns anything else.
        ValueError: if the engine has another seed.
        SharedError: if it has a handler, a model or anything else that an earlier run of the study had.
    """
    seed_everything(seed)
    engine, own = _engine_of(build(seed), seed)
    run = own or run
    if run is None:
        raise TypeError(
            f"build({seed}) returned only an engine; return (engine, run), where run is a function that runs the "
            "engine, such as lambda engine: engine.run(loader, max_epochs=5), or set Study(run=...)"
        )
    if engine.seed != seed:
        raise ValueError(
            f"build({seed}) returned an engine with seed={engine.seed}; create the engine with Engine(..., seed=seed)"
        )
    check_new(engine, f"build({seed})")
    check_not_left(engine, f"build({seed})")
    engine.streams, engine.findings.prints = streams or engine.streams, False
    if not files:
        engine.dry_run = True  # evaluations inside the run inherit it
        for handler in engine.handlers.values():
            if writes_or_shows(handler):
                handler.enabled = False
    return engine, run


def _engine_of(built: Any, seed: int) -> tuple[Engine, Run | None]:
    """The engine that ``build`` returned, and the function that runs it, if it returned one."""
    engine, run = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(engine, Engine) or not (run is None or callable(run)):
        raise TypeError(
            f"build({seed}) returned {built!r}; expected an Engine, or a tuple of an Engine and a function that runs it"
        )
    return engine, run


def exchange(engine: Engine, name: str, factory: Callable[[], Handler]) -> Handler:
    """Replace the handler with this name by a new one, whose receivers run in its places."""
    with unchanged_random_state():
        handler = factory()
    if not isinstance(handler, Handler):
        raise TypeError(f"the factory for the alternative to {name!r} returned {handler!r}; expected a Handler")
    check_new(handler, f"the factory for the alternative to {name!r}")
    place = engine.handlers.place_of(name)
    engine.detach(name)
    engine.handlers.attach([handler], place=place)
    return handler


class _EpochReached(BaseException):
    """Ends a run after an epoch; not an `Exception`, so that ``except Exception`` does not catch it."""


def _end_after(engine: Engine, epoch: int) -> None:
    def end(engine: Engine) -> None:
        if engine.state.epoch == epoch:
            raise _EpochReached

    engine.connect(Events.EPOCH_COMPLETED, end, phase=Phase.PERSIST, rank=sys.maxsize)


def make(task: Task) -> Outcome:
    """Make a run in this process; an error it raises becomes part of the outcome, but for a `SharedError`."""
    with _run_lock, unchanged_random_state(), one_thread():
        memory = _Memory()
        engine: Engine | None = None
        composed: dict[str, str] = {}
        began: float | None = None
        error: str | None = None
        predictions: dict[str, Any] | None = None
        try:
            engine, run = compose(task.build, task.run, task.streams, task.files, task.seed)
            begins, left, composed = beginnings_of(engine), Left(engine), digests_of_parts(engine, run)
            engine.connect(Events.STARTED, lambda engine, left=left: left.started())
            history = _History(engine)
            for name in task.off:
                engine.handlers[name].enabled = False
            for name, factory in task.swaps:
                exchange(engine, name, factory)
            if not engine.snapshots.has_loaded_state:  # a state loaded in build() is the same for all variants
                engine.connect(Events.STARTED, _check_not_resumed)
            if task.until is not None:
                _end_after(engine, task.until)
            began = time.perf_counter()
            try:
                with contextlib.suppress(_EpochReached):
                    run(engine)
            finally:
                left.note()
            if task.predict is not None:
                predictions = task.predict(engine)
        except SharedError:  # of the study, and not of this run
            raise
        except (Exception, SystemExit):
            # Addresses of objects differ from process to process.
            error = re.sub(r"\b0x[0-9a-f]{6,}\b", "0x...", traceback.format_exc())
        seconds = 0.0 if began is None else time.perf_counter() - began
        if engine is None:
            return Outcome(error, memory=memory.peak())
        metrics = engine.state.metrics
        numbers = as_numbers(metrics)
        return Outcome(
            error,
            tuple(sorted(name for name, handler in engine.handlers.items() if handler.enabled)),
            numbers,
            tuple(sorted({*metrics, *metrics.owners})),
            engine.updates[0].steps,
            seconds,
            memory.peak(),
            tuple(begins[:2]),
            history.curves,
            predictions,
            engine.state.epoch,
            last_values_of(engine),
            composed,
        )


def beginnings_of(engine: Engine) -> list[str]:
    """A list of the digest of the weights; once the engine has started, that of the data is appended."""
    begins = [digest(value for root in engine.modules.values() for value in root.state_dict().values())]
    engine.connect(Events.STARTED, lambda engine: begins.append(digest(_data_of(engine))))
    return begins


class _History:
    """The scalar metrics at the ends of epochs; of long runs every second one is dropped, as often as it takes."""

    def __init__(self, engine: Engine) -> None:
        self.curves: dict[str, list[list[float]]] = {}
        self._every = 1
        self._serials: dict[str, int] = {}
        engine.connect(Events.EPOCH_COMPLETED, self._note, phase=Phase.PERSIST)

    def _note(self, engine: Engine) -> None:
        metrics, epoch = engine.state.metrics, engine.state.epoch
        new = metrics.numbers_since(self._serials)
        self._serials.update(metrics.serials)
        for name, value in sorted(new.items()):
            if epoch % self._every == 0 or epoch == engine.state.max_epochs:
                self.curves.setdefault(name, []).append([epoch, value])
        if any(len(curve) > MOST_POINTS for curve in self.curves.values()):
            self._every *= 2
            for name, curve in self.curves.items():
                self.curves[name] = [point for point in curve if point[0] % self._every == 0]


def digest(tensors: Iterable[object]) -> str:
    """A digest of the beginnings of tensors; others are passed over."""
    return digest_of([one for one in tensors if isinstance(one, torch.Tensor)])


def _data_of(engine: Engine) -> list[torch.Tensor]:
    """The tensors of a list of batches, or of a `TensorDataset`."""
    data = None if engine.feed.source is None else engine.feed.source.given
    data = getattr(data, "dataset", data)
    if isinstance(data, TensorDataset):
        return list(data.tensors)
    return tensors_in(data) if isinstance(data, list | tuple) else []


def _check_not_resumed(engine: Engine) -> None:
    if engine.snapshots.has_loaded_state:
        raise RuntimeError(
            "the run would resume from a checkpoint, but the runs of a study start from scratch; remove "
            "Checkpoint(resume=True) from build, or set Study(files=False)"
        )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, because the results of floating-point sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Memory:
    """Measures the peak memory of this process, including its GPU, from now on; outside Linux, since it started."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Peak memory in bytes; 0 if the system does not report it."""
        on_device = (
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0
        )
        with contextlib.suppress(OSError), open("/proc/self/status") as file:
            if found := re.search(r"VmHWM:\s+(\d+) kB", file.read()):
                return int(found[1]) * 1024 + on_device
        try:
            import resource
        except ImportError:
            return on_device
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + on_device
