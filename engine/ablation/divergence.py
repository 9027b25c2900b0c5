"""Where two runs part: the first event at which their states differ."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from signalfire import Engine, Events, Phase
from signalfire.batches import tensors_in
from signalfire.data import generators_of

from ..randomness import random_state, set_random_state

__all__ = ["Divergence", "divergence"]

Build = Callable[[], Any]
Run = Callable[[Engine], object]
Position = tuple[float, ...]

KINDS = ("parameters", "gradients", "optimizer", "random", "batch", "loss")
_WATCHED = ("parameters", "gradients", "optimizer", "random")

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
_LAST = 2**31  # a rank after every other


@dataclass(frozen=True)
class Divergence:
    """The first event of the loop after which two runs differ; ``print`` says it in a sentence.

    Attributes:
        event: its name, such as "GRADIENTS_READY"; "COMPLETED" if one run ends and the other goes on.
        epoch: in which it was.
        iteration: in which it was.
        kind: what differs: "parameters", "gradients", "optimizer", "random", "batch", "loss", or "length" of the runs.
        name: the parameter, or what else it is, by its name.
        difference: the largest difference of two of its values; NaN if only one of them is NaN; None where there is no number.
        others: how many other things differ at the same event.
        detail: what to know beside it, such as two shapes.
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
            "length": self.name,
        }.get(self.kind, f"the {self.kind} ({self.name})")
        size = "" if self.difference is None else f" by up to {self.difference:.3g}"
        detail = f" ({self.detail})" if self.detail else ""
        others = f"; {self.others} more differ there" if self.others else ""
        verb = "" if self.kind == "length" else " differs"
        place = f"epoch {self.epoch}, iteration {self.iteration}" if self.epoch else "before the first epoch"
        return f"The runs part at {self.event}, {place}: {what}{verb}{size}{detail}{others}."


def divergence(
    build_a: Build,
    build_b: Build,
    *,
    run: Run | None = None,
    watch: Sequence[str] = _WATCHED,
    rtol: float = 0,
) -> Divergence | None:
    """Run two engines side by side, and find the first event of the loop after which they differ; None if they never do.

    Each is built and run in a thread of its own, and only one of the two runs at any time: one up to its next event, then the
    other up to the same, where the two are compared once all receivers have run. So nothing has to be recorded, and nothing runs
    on behind the event that is found. Both begin with the caller's random states, see their own from then on, and the caller gets
    theirs back. An event that only one of the two emits is passed over, and so
    are those of micro-batches.

    What takes from a run what it holds apart from the loop's state, such as averages, shows where it comes to act on that.

    Args:
        build_a: makes the first engine, or a pair of it and ``run(engine)`` that trains it; called without arguments.
        build_b: makes the second one. They may share nothing that changes but DataLoaders without persistent workers.
        run: trains an engine, where the builds do not give it: ``lambda engine: engine.run(loader, max_epochs=1)``.
        watch: what is compared, in the order in which it is told: "parameters" (with buffers), "gradients", "optimizer" (its
            state and options), "random" (the global generators); also "batch" and "loss".
        rtol: tensors are the same up to this share of the largest value in them; 0 for bit-equal. Random states always have to be
            the same.

    Raises:
        TypeError, ValueError: for a build that gives no engine, several processes, or parameters that both engines have.
        Exception: an error of one of the two runs leaves, and says whose it is.

    Handlers that write files (`Handler.writes`) take no part, so that the two do not write the same; nor does what needs the main
    thread, such as Preemption: detach it.

    Example:
        >>> from functools import partial
        >>> from signalfire import Update
        >>> from signalfire.handlers import GradientClipping
        >>> def build(*handlers):
        ...     torch.manual_seed(0)
        ...     update = Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
        ...     engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        ...     engine.attach(*handlers)
        ...     return engine
        >>> data = [(torch.ones(4, 2), torch.ones(4, 1))]
        >>> found = divergence(build, lambda: build(GradientClipping(max_norm=0.1)), run=lambda e: e.run(data, max_epochs=1))
        >>> found.event, found.iteration, found.kind, found.name
        ('GRADIENTS_READY', 1, 'gradients', 'model.weight')
    """
    watch = (watch,) if isinstance(watch, str) else tuple(watch)
    _check_arguments(build_a, build_b, watch, rtol)
    state = random_state()
    a = _Side("a", build_a, run, state)
    b = _Side("b", build_b, run, state, beside=a)
    sides = (a, b)
    try:
        for side in sides:
            side.advance()
        while not (a.ended and b.ended):
            if a.position == b.position:
                if not _in_pieces(a, b) and (found := _compared(a, b, watch, rtol)) is not None:
                    return found
                a.advance()
                b.advance()
                continue
            behind, ahead = sides if a.position < b.position else (b, a)
            if behind.event is Events.GET_BATCH_COMPLETED and ahead.event is Events.COMPLETED:
                return _one_ended(ahead, behind)
            behind.advance()
        return None
    finally:
        for side in sides:
            side.stop()
        set_random_state(state)


def _check_arguments(build_a: Build, build_b: Build, watch: tuple[str, ...], rtol: float) -> None:
    if not watch or (unknown := [kind for kind in watch if kind not in KINDS]):
        raise ValueError(
            f"divergence(watch={watch!r}): give some of {', '.join(KINDS)}; not {unknown if watch else watch}"
        )
    if isinstance(rtol, bool) or not isinstance(rtol, int | float) or not 0 <= rtol < 1:
        raise ValueError(f"divergence(rtol={rtol!r}): it has to be a number with 0 <= rtol < 1")
    for name, build in (("build_a", build_a), ("build_b", build_b)):
        if not callable(build):
            raise TypeError(f"divergence({name}={build!r}): give a function that returns a new engine")


class _Stop(BaseException):
    """Leaves a run that is not to go on; no `Exception`, so that nobody takes it for an error of theirs."""


class _Side:
    """One of the two runs: a thread that waits at each event until it is told to go on.

    Attributes:
        engine: None before it is built.
        position: of the event at which it waits, so that those of two runs can be compared; infinite once it has ended.
        event: that event.
    """

    def __init__(
        self, name: str, build: Build, run: Run | None, state: dict[str, Any], beside: _Side | None = None
    ) -> None:
        self.name = name
        self.build = build
        self.run = run
        self.beside = beside
        self.state = state  # the global random states, as this run sees them
        self.own: list[tuple[torch.Generator, Tensor]] = []  # those of its data's generators, which both may share
        self.engine: Engine | None = None
        self.position: Position = ()
        self.event = Events.MODEL_SETUP
        self.runs = 0
        self.ended = False
        self.stopping = False
        self.error: BaseException | None = None
        self.go, self.waits = threading.Semaphore(0), threading.Semaphore(0)
        # How many threads torch uses belongs to the thread, and decides in which order sums are made.
        self.threads = torch.get_num_threads()
        self.thread = threading.Thread(target=self._work, name=f"divergence-{name}", daemon=True)
        self.thread.start()

    def advance(self) -> None:
        """Let it run to its next event, or to its end."""
        set_random_state(self.state)
        for generator, state in self.own:
            generator.set_state(state)
        self.go.release()
        self.waits.acquire()
        self.state = random_state()
        source = None if self.engine is None else self.engine.feed.source
        self.own = [] if source is None else [(one, one.get_state()) for one in generators_of(source.data)]
        if self.error is not None:
            self.error.add_note(f"in run {self.name!r} of divergence()")
            raise self.error

    def stop(self) -> None:
        self.stopping = True
        if not self.ended:
            self.go.release()
        self.thread.join()

    def _work(self) -> None:
        self.go.acquire()
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
            self.waits.release()

    def _train(self) -> None:
        built = self.build()
        engine, run = built if isinstance(built, tuple) and len(built) == 2 else (built, self.run)
        if not isinstance(engine, Engine):
            raise TypeError(
                f"divergence(build_{self.name}=...) returned {engine!r}; it has to return an Engine, or (engine, run)"
            )
        if not callable(run):
            raise TypeError(
                f"divergence(run={run!r}): give a function run(engine), or let the builds return (engine, run)"
            )
        if engine.processes.distributed:
            raise ValueError("divergence(): it compares runs of a single process; detach what distributes them")
        if self.beside is not None and self.beside.engine is not None:
            _check_apart(self.beside.engine, engine)
        engine.dry_run = True
        for event in _EVENTS:
            engine.connect(event, self._hook(event), phase=Phase.PERSIST, rank=_LAST)
        self.engine = engine
        run(engine)

    def _hook(self, event: Events) -> Callable[[Engine], None]:
        def wait(engine: Engine) -> None:
            if self.stopping:
                return
            self.runs += event is Events.MODEL_SETUP
            self.event, self.position = event, self._position(engine, event)
            self.waits.release()
            self.go.acquire()
            if self.stopping:
                raise _Stop

        return wait

    def _position(self, engine: Engine, event: Events) -> Position:
        state = engine.state
        if event in _SETUP:
            return self.runs, -1, _SETUP.index(event)
        if event is Events.COMPLETED:
            return self.runs, _NOWHERE
        if event in (Events.EPOCH_STARTED, Events.GET_BATCH_STARTED):  # of the iteration that comes
            return self.runs, state.epoch, state.iteration + 1, 0, _BEFORE.index(event)
        if event in _BEFORE:
            return self.runs, state.epoch, state.iteration, 0, _BEFORE.index(event)
        if event in _AFTER:
            return self.runs, state.epoch, state.iteration, 2, _AFTER.index(event)
        return self.runs, state.epoch, state.iteration, 1, engine.updates.index(state.update), _UPDATE.index(event)


def _check_apart(a: Engine, b: Engine) -> None:
    own = {id(p) for _, p in _parameters(a)}
    both = [name for name, p in _parameters(b) if id(p) in own]
    if a is b or both:
        what = "engine" if a is b else f"parameter {both[0]!r}"
        raise ValueError(f"divergence(): the builds share the {what}; build a model of its own in each")


def _in_pieces(a: _Side, b: _Side) -> bool:
    """Whether this event is one of a piece of a batch, which need not be that of the other run."""
    engines = [side.engine for side in (a, b) if side.engine is not None]
    return a.event in _GRADIENTS and any(engine.overrides.gradients is not None for engine in engines)


def _one_ended(first: _Side, other: _Side) -> Divergence:
    assert first.engine is not None
    state = first.engine.state
    why = "" if state.stop_reason is None else f" ({state.stop_reason})"
    what = f"run {first.name!r} ends there{why}, and run {other.name!r} goes on"
    return Divergence(Events.COMPLETED.name, state.epoch, state.iteration, "length", what)


def _compared(a: _Side, b: _Side, watch: Sequence[str], rtol: float) -> Divergence | None:
    assert a.engine is not None
    assert b.engine is not None
    found: tuple[str, str, float | None, str] | None = None
    count = 0
    for kind in watch:
        ours, theirs = dict(_values(a, kind)), dict(_values(b, kind))
        for name in ours | theirs:
            different = _difference(ours.get(name), theirs.get(name), 0 if kind == "random" else rtol)
            if different is not None:
                count += 1
                found = found or (kind, name, *different)
    if found is None:
        return None
    state = a.engine.state
    kind, name, difference, detail = found
    if kind == "random":  # how far apart two states are means nothing
        difference, detail = None, ""
    return Divergence(a.event.name, state.epoch, state.iteration, kind, name, difference, count - 1, detail)


def _parameters(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for root, module in engine.modules.items():
        for key, p in module.named_parameters():
            seen.add(id(p))
            yield f"{root}.{key}", p
    for update in engine.updates:  # those that belong to no module
        for place, own in enumerate(update.parameters):
            if id(own) not in seen:
                yield f"parameter {place} of update {update.name!r}", own


def _values(side: _Side, kind: str) -> Iterator[tuple[str, Any]]:
    """What is watched, by name."""
    engine = side.engine
    assert engine is not None
    if kind == "parameters":
        yield from _parameters(engine)
        for root, module in engine.modules.items():
            yield from ((f"{root}.{key}", buffer) for key, buffer in module.named_buffers())
    elif kind == "gradients":
        yield from ((name, p.grad) for name, p in _parameters(engine))
    elif kind == "optimizer":
        yield from _optimizers(engine)
    elif kind == "random":
        yield from (("python", side.state["python"]), ("numpy", side.state["numpy"]), ("torch", side.state["torch"]))
        yield from ((f"cuda:{place}", state) for place, state in enumerate(side.state.get("cuda", ())))
    elif kind == "batch":
        yield from ((f"tensor {place}", tensor) for place, tensor in enumerate(tensors_in(engine.state.batch)))
    elif (loss := engine.state.update.backward_loss) is not None:
        yield f"of update {engine.state.update.name!r}", loss


def _optimizers(engine: Engine) -> Iterator[tuple[str, Any]]:
    names = {id(p): name for name, p in _parameters(engine)}
    for update in engine.updates:
        if update.optimizer is None:
            continue
        for number, group in enumerate(update.optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"{key} of group {number} (update {update.name!r})", value
        for p, state in update.optimizer.state.items():
            for key, value in state.items():
                yield f"{key} of {names.get(id(p), '?')}", value


def _difference(ours: Any, theirs: Any, rtol: float) -> tuple[float | None, str] | None:
    """How two values differ: by how much, and what else is to be said; None if they are the same."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _tensors_difference(ours.detach(), theirs.detach(), rtol)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        pairs = (_difference(one, other, rtol) for one, other in zip(ours, theirs, strict=True))
        return next((pair for pair in pairs if pair is not None), None)
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        if ours == theirs or (ours != ours and theirs != theirs):
            return None
        difference = abs(ours - theirs)
        return None if difference <= rtol * max(abs(ours), abs(theirs)) else (difference, f"{ours:g} and {theirs:g}")
    if type(ours) is type(theirs) and ours == theirs:
        return None
    if ours is None or theirs is None:
        return None, f"there is one in run {'b' if ours is None else 'a'!r} alone"
    return None, f"{ours!r} and {theirs!r}"


def _tensors_difference(ours: Tensor, theirs: Tensor, rtol: float) -> tuple[float | None, str] | None:
    if ours.shape != theirs.shape:
        return None, f"its shape is {tuple(ours.shape)} and {tuple(theirs.shape)}"
    if ours.dtype != theirs.dtype:
        return None, f"its dtype is {ours.dtype} and {theirs.dtype}"
    if ours.device == theirs.device and torch.equal(ours, theirs):
        return None
    kind = torch.complex128 if ours.is_complex() else torch.float64
    one, other = ours.to("cpu", kind), theirs.to("cpu", kind)
    alike = (one == other) | (one.isnan() & other.isnan())
    if alike.all():
        return None
    difference = float((one - other).abs()[~alike].max())
    largest = float(torch.maximum(one.abs(), other.abs()).nan_to_num(0, 0).max())
    return None if math.isfinite(difference) and difference <= rtol * largest else (difference, "")
