"""Where two runs diverge: the first event at which their states differ."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signalfire import Engine, Events, Phase
from signalfire.data import generators_of

from ..authoring.randomness import random_state, set_random_state
from ..traces.watched import difference, parameters_of, values_of

__all__ = ["Divergence", "divergence"]

Build = Callable[[], Any]
Run = Callable[[Engine], object]
Position = tuple[float, ...]

KINDS = ("parameters", "gradients", "optimizer", "random", "handlers", "metrics", "files", "batch", "loss")
_WATCHED = ("parameters", "gradients", "optimizer", "random", "handlers", "metrics", "files")
_SLOW = ("handlers", "metrics")  # compared at the end of iterations, epochs and runs only

_SETUP = (Events.MODEL_SETUP, Events.OPTIMIZER_SETUP, Events.STARTED, Events.CHECKPOINT_LOADED)
_BEFORE = (Events.EPOCH_STARTED, Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED)
_UPDATE = (
    Events.UPDATE_STARTED, Events.FORWARD_STARTED, Events.FORWARD_COMPLETED, Events.LOSS_COMPUTED, Events.BACKWARD_STARTED,
    Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED, Events.OPTIMIZER_STEP_COMPLETED,
    Events.UPDATE_COMPLETED,
)  # fmt: skip
_GRADIENTS = _UPDATE[1:6]
_AFTER = (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED)
_EVENTS = (*_SETUP, *_BEFORE, *_UPDATE, *_AFTER, Events.COMPLETED)

_NOWHERE = float("inf")
_LAST = 2**31  # rank of a receiver that runs after all others


@dataclass(frozen=True)
class Divergence:
    """The first event of the loop after which two runs differ; ``print`` shows it as a sentence.

    Attributes:
        event: Name of the event, such as "GRADIENTS_READY"; "COMPLETED" if one run ends and the other continues.
        epoch: Epoch of the event.
        iteration: Iteration of the event.
        kind: What differs: one of the kinds that `divergence` watches, or the "length" of the runs.
        name: Name of the parameter, or of whatever else differs.
        difference: Largest absolute difference between the two values; NaN if only one is NaN; None if there is no number.
        others: Number of other values that differ at the same event.
        detail: Further details, such as the two shapes.
    """

    event: str
    epoch: int
    iteration: int
    kind: str
    name: str
    difference: float | None = None
    others: int = 0
    detail: str = ""

    def __str__(self) -> str:
        what = {
            "parameters": f"the parameter or buffer {self.name}",
            "gradients": f"the gradient of {self.name}",
            "optimizer": f"the optimizer's {self.name}",
            "random": f"the random state of {self.name}",
            "handlers": f"the state of handler {self.name}",
            "metrics": f"the metric {self.name}",
            "files": f"the file {self.name}",
            "length": self.name,
        }.get(self.kind, f"the {self.kind} ({self.name})")
        size = "" if self.difference is None else f" by up to {self.difference:.3g}"
        detail = f" ({self.detail})" if self.detail else ""
        others = f"; {self.others} other values differ at this event" if self.others else ""
        verb = "" if self.kind == "length" else " differs"
        place = f"epoch {self.epoch}, iteration {self.iteration}" if self.epoch else "before the first epoch"
        return f"The runs diverge at {self.event}, {place}: {what}{verb}{size}{detail}{others}."


def divergence(
    build_a: Build,
    build_b: Build,
    *,
    run: Run | None = None,
    watch: Sequence[str] = _WATCHED,
    rtol: float = 0,
    files: tuple[str | PathLike[str], str | PathLike[str]] | None = None,
) -> Divergence | None:
    """Run two engines in lockstep and return the first event after which their states differ; None if they never do.

    Each engine is built and run in its own thread, but only one thread runs at a time: one run advances to its next event, the
    other to the same event, and their states are compared once all receivers have run. Nothing is recorded, and both runs end at
    the event that is found. Both start from the caller's random states and keep separate ones; the caller's are restored at the
    end. Events that only one run emits, and those of micro-batches, are skipped.

    By default everything is compared that two runs with the same results have in common: the training state at each event; what
    handlers keep, such as averages, and the metrics, those of evaluations included, at the end of each iteration, epoch and run;
    and, if two folders are given, the files in them at the end. Handlers and metrics that only one run has are no difference, so
    that a handler may be in one run only; nor are metrics of time, which their handlers announce as not saved. None means that
    nothing of what is watched differs, bit for bit.

    Args:
        build_a: Builds the first engine; called without arguments. It may return ``(engine, run)`` instead.
        build_b: Builds the second. The two may share no mutable object except DataLoaders without persistent workers.
        run: Trains an engine if the builds return no function: ``lambda engine: engine.run(loader, max_epochs=1)``.
        watch: What to compare; the first of these that differs is reported: "parameters" (with buffers), "gradients", "optimizer"
            (its state and options), "random" (the global generators), "handlers" (the state of each, such as averages),
            "metrics", "files"; also "batch" and "loss".
        rtol: Tolerance for tensors, relative to the largest magnitude in either; 0 requires bitwise equality. Random states
            must always be equal.
        files: Two folders, into which each run writes its own files: handlers that write files then stay enabled, and the files
            are compared byte for byte once both runs have ended. Without, such handlers are disabled and no file is compared.

    Raises:
        TypeError, ValueError: for a build that returns no engine, a distributed run, or engines that share parameters.
        Exception: any error of one of the two runs, with a note that names the run.

    Handlers that need the main thread, such as Preemption, raise an error: detach them.

    Example:
        >>> from signalfire import Update
        >>> from signalfire.handlers import GradientClipping
        >>> def build(*handlers):
        ...     torch.manual_seed(0)
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        ...     engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        ...     engine.attach(handlers)
        ...     return engine
        >>> data = [(torch.ones(4, 2), torch.ones(4, 1))]
        >>> found = divergence(
        ...     build,
        ...     lambda: build(GradientClipping(max_norm=0.1)),
        ...     run=lambda e: e.run(data, max_epochs=1),
        ... )
        >>> found.event, found.iteration, found.kind, found.name
        ('GRADIENTS_READY', 1, 'gradients', 'model.weight')
    """
    watch = (watch,) if isinstance(watch, str) else tuple(watch)
    _check_arguments(build_a, build_b, watch, rtol)
    folders = _check_files(files, watch)
    state = random_state()
    a = _Side("a", build_a, run, state, dry=folders is None)
    b = _Side("b", build_b, run, state, other=a, dry=folders is None)
    try:
        found = _in_lockstep(a, b, watch, rtol)
        return _files_compared(a, *folders) if found is None and folders is not None else found
    finally:
        for side in (a, b):
            side.stop()
        set_random_state(state)


def _in_lockstep(a: _Side, b: _Side, watch: tuple[str, ...], rtol: float) -> Divergence | None:
    """Run both to their ends, or to the first event after which they differ."""
    for side in (a, b):
        side.advance()
    while not (a.ended and b.ended):
        if a.position == b.position:
            if not _in_micro_batch(a, b) and (found := _compared(a, b, watch, rtol)) is not None:
                return found
            a.advance()
            b.advance()
            continue
        behind, ahead = (a, b) if a.position < b.position else (b, a)
        if behind.event is Events.GET_BATCH_COMPLETED and ahead.event is Events.COMPLETED:
            return _one_ended(ahead, behind)
        behind.advance()
    return None


def _check_arguments(build_a: Build, build_b: Build, watch: tuple[str, ...], rtol: float) -> None:
    if not watch or (unknown := [kind for kind in watch if kind not in KINDS]):
        raise ValueError(
            f"divergence(watch={watch!r}): expected one or more of {', '.join(KINDS)}; got "
            f"{unknown if watch else watch}"
        )
    if isinstance(rtol, bool) or not isinstance(rtol, int | float) or not 0 <= rtol < 1:
        raise ValueError(f"divergence(rtol={rtol!r}): expected a number with 0 <= rtol < 1")
    for name, build in (("build_a", build_a), ("build_b", build_b)):
        if not callable(build):
            raise TypeError(f"divergence({name}={build!r}): expected a function that returns a new engine")


def _check_files(files: Any, watch: tuple[str, ...]) -> tuple[Path, Path] | None:
    if files is None:
        return None
    if not isinstance(files, tuple | list) or len(files) != 2:
        raise TypeError(f"divergence(files={files!r}): expected two folders, one for each run")
    first, second = (Path(one) for one in files)
    if first.resolve() == second.resolve():
        raise ValueError(f"divergence(files={files!r}): expected a separate folder for each run")
    if "files" not in watch:
        raise ValueError(f"divergence(files={files!r}, watch={watch!r}): add 'files' to watch, or omit files=")
    return first, second


class _Stop(BaseException):
    """Ends a run early; not an `Exception`, so that ``except Exception`` does not catch it."""


@dataclass(eq=False)
class _Side:
    """One of the two runs: a thread that pauses at each event until `advance` is called.

    Attributes:
        engine: The engine; None before it is built.
        position: Sort key of the event at which the run is paused, comparable between runs; infinite once the run has ended.
        event: The event at which the run is paused.
    """

    name: str
    build: Build
    run: Run | None
    state: dict[str, Any]  # the global random states of this run
    other: _Side | None = None
    dry: bool = True
    own: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)  # states of its data's, which may be shared
    engine: Engine | None = None
    position: Position = ()
    event: Events = Events.MODEL_SETUP
    runs: int = 0
    ended: bool = False
    stopping: bool = False
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.resumes, self.pauses = threading.Semaphore(0), threading.Semaphore(0)
        # torch's number of threads is a setting of each thread, and it determines the order of floating-point sums.
        self.threads = torch.get_num_threads()
        self.thread = threading.Thread(target=self._work, name=f"divergence-{self.name}", daemon=True)
        self.thread.start()

    def advance(self) -> None:
        """Resume the run up to its next event or its end."""
        set_random_state(self.state)
        for generator, state in self.own:
            generator.set_state(state)
        self.resumes.release()
        self.pauses.acquire()
        self.state = random_state()
        source = None if self.engine is None else self.engine.feed.source
        self.own = [] if source is None else [(one, one.get_state()) for one in generators_of(source.data)]
        if self.error is not None:
            self.error.add_note(f"in run {self.name!r} of divergence()")
            raise self.error

    def stop(self) -> None:
        self.stopping = True
        if not self.ended:
            self.resumes.release()
        self.thread.join()

    def _work(self) -> None:
        self.resumes.acquire()
        try:
            torch.set_num_threads(self.threads)
            if not self.stopping:
                self._train()
        except _Stop:
            pass
        except BaseException as error:
            if not self.stopping:
                self.error = error
        finally:
            self.position, self.ended = (_NOWHERE,), True
            self.pauses.release()

    def _train(self) -> None:
        built = self.build()
        engine, run = built if isinstance(built, tuple) and len(built) == 2 else (built, self.run)
        if not isinstance(engine, Engine):
            raise TypeError(
                f"divergence(build_{self.name}=...) returned {engine!r}; expected an Engine or (engine, run)"
            )
        if not callable(run):
            raise TypeError(
                f"divergence(run={run!r}): expected a function run(engine); alternatively, return (engine, run) "
                "from both builds"
            )
        if engine.processes.distributed:
            raise ValueError(
                "divergence() only supports single-process runs; detach the handler that sets up distributed training"
            )
        if self.other is not None and self.other.engine is not None:
            _check_separate(self.other.engine, engine)
        engine.dry_run, engine.findings.prints = self.dry, False
        for event in _EVENTS:
            engine.connect(event, self._pause_at(event), phase=Phase.PERSIST, rank=_LAST)
        self.engine = engine
        run(engine)

    def _pause_at(self, event: Events) -> Callable[[Engine], None]:
        def pause(engine: Engine) -> None:
            if self.stopping:
                return
            self.runs += event is Events.MODEL_SETUP
            self.event, self.position = event, self._position(engine, event)
            self.pauses.release()
            self.resumes.acquire()
            if self.stopping:
                raise _Stop

        return pause

    def _position(self, engine: Engine, event: Events) -> Position:
        state = engine.state
        if event in _SETUP:
            return self.runs, -1, _SETUP.index(event)
        if event is Events.COMPLETED:
            return self.runs, _NOWHERE
        if event in (Events.EPOCH_STARTED, Events.GET_BATCH_STARTED):  # of the next iteration
            return self.runs, state.epoch, state.iteration + 1, 0, _BEFORE.index(event)
        if event in _BEFORE:
            return self.runs, state.epoch, state.iteration, 0, _BEFORE.index(event)
        if event in _AFTER:
            return self.runs, state.epoch, state.iteration, 2, _AFTER.index(event)
        return self.runs, state.epoch, state.iteration, 1, engine.updates.index(state.update), _UPDATE.index(event)


def _check_separate(a: Engine, b: Engine) -> None:
    own = {id(p) for _, p in parameters_of(a)}
    both = [name for name, p in parameters_of(b) if id(p) in own]
    if a is b or both:
        what = "engine" if a is b else f"parameter {both[0]!r}"
        raise ValueError(f"divergence(): both builds use the same {what}; create a separate one in each build")


def _in_micro_batch(a: _Side, b: _Side) -> bool:
    """Whether this event belongs to a micro-batch, which need not match one of the other run."""
    engines = [side.engine for side in (a, b) if side.engine is not None]
    return a.event in _GRADIENTS and any(engine.overrides.gradients is not None for engine in engines)


def _one_ended(first: _Side, other: _Side) -> Divergence:
    assert first.engine is not None
    state = first.engine.state
    why = "" if state.stop_reason is None else f" ({state.stop_reason})"
    what = f"run {first.name!r} ends{why}, while run {other.name!r} continues"
    return Divergence(Events.COMPLETED.name, state.epoch, state.iteration, "length", what)


def _compared(a: _Side, b: _Side, watch: Sequence[str], rtol: float) -> Divergence | None:
    assert a.engine is not None
    ending = a.event in _AFTER or a.event is Events.COMPLETED
    kinds = [kind for kind in watch if kind != "files" and (ending or kind not in _SLOW)]
    found = [(kind, *one) for kind in kinds for one in _differences(a, b, kind, rtol)]
    if not found:
        return None
    state = a.engine.state
    kind, name, number, detail = found[0]
    if kind == "random":  # the numeric distance of two random states is meaningless
        number, detail = None, ""
    return Divergence(a.event.name, state.epoch, state.iteration, kind, name, number, len(found) - 1, detail)


def _differences(a: _Side, b: _Side, kind: str, rtol: float) -> Iterator[tuple[str, float | None, str]]:
    """The values of one kind that differ, by name."""
    ours, theirs = (dict(values_of(side.engine, side.state, kind)) for side in (a, b) if side.engine is not None)
    for name in ours | theirs if kind not in _SLOW else [name for name in ours if name in theirs]:
        different = difference(ours.get(name), theirs.get(name), 0 if kind == "random" else rtol)
        if different is not None:
            yield name, *different


def _files_compared(a: _Side, first: Path, second: Path) -> Divergence | None:
    """The first file, by name, that differs."""
    assert a.engine is not None
    ours, theirs = (
        {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
        for folder in (first, second)
    )
    different = []
    for name in sorted(ours | theirs):
        if name not in ours or name not in theirs:
            different.append((name, f"only run {'b' if name not in ours else 'a'!r} has this file"))
        elif ours[name].read_bytes() != theirs[name].read_bytes():
            different.append((name, f"{ours[name].stat().st_size} and {theirs[name].stat().st_size} bytes"))
    if not different:
        return None
    state = a.engine.state
    name, detail = different[0]
    others = len(different) - 1
    return Divergence(Events.COMPLETED.name, state.epoch, state.iteration, "files", name, None, others, detail)
