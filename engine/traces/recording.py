"""A run that is repeated, with a look at all of it after each receiver, each module or each operation."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..authoring.batches import tensors_in
from ..core.connection import Connection, Phase, Receiver
from ..core.events import EventEnum, Events
from ..core.signals import Signal
from .contents import digests_of
from .digests import Digests
from .scripts import in_short

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["OF_UPDATES", "Operation", "Recorded", "Step", "Stopped", "record_operations", "record_steps"]

OF_UPDATES = (
    *(Events.UPDATE_STARTED, Events.FORWARD_STARTED, Events.FORWARD_COMPLETED, Events.LOSS_COMPUTED),
    *(Events.BACKWARD_STARTED, Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED),
    *(Events.OPTIMIZER_STEP_COMPLETED, Events.UPDATE_COMPLETED),
)
_EVENTS = (
    *(Events.STARTED, Events.EPOCH_STARTED, Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED),
    *(Events.ITERATION_STARTED, *OF_UPDATES, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED),
)
_KEPT = ("random", "gradients", "parameters", "buffers", "optimizer", "handlers", "metrics")
_FIRST = -(10**9)  # a rank before all others


class Stopped(BaseException):
    """Ends a run once what was to be seen of it is recorded; not an `Exception`, which a script may catch."""


class Step(NamedTuple):
    """What a run consists of after a receiver, or before the first one of an event.

    Attributes:
        iteration: The iteration.
        event: The name of the event.
        update: The name of the update, at its events.
        shard: The shard, at its events.
        receiver: The receiver; None before the first.
        occurrence: Which of these it is in the iteration, from 1.
        digests: 16 hexadecimal digits for each thing.
    """

    iteration: int
    event: str
    update: str | None
    shard: int
    receiver: str | None
    occurrence: int
    digests: Mapping[str, str]

    @property
    def key(self) -> tuple[Any, ...]:
        """What the same step of another run has, too."""
        return tuple(self[:6])


class _Steps:
    """Records the steps of the iterations from one to another, and stops the run behind them."""

    def __init__(self, engine: Engine, since: int, until: int) -> None:
        self.engine, self.since, self.until = engine, since, until
        self.found: list[Step] = []
        self._counts: dict[tuple[Any, ...], int] = {}
        self._own: set[int] = set()
        self._complete = False  # the last iteration that is looked at
        for event in _EVENTS:
            receiver = partial(self._look, event, None)
            self._own.add(id(receiver))
            engine.connect(event, receiver, phase=Phase.PREPARE, rank=_FIRST)
        engine.signals.call_through(self._around)

    def _around(self, signal: Signal, connection: Connection) -> Receiver:
        call, event = connection.call, signal.event
        if id(connection.receiver) in self._own or event not in _EVENTS or not connection.is_foreign:
            return call
        name = _name_of(connection)

        def called(engine: Engine, **options: Any) -> Any:
            result = call(engine, **options)
            self._look(event, name, engine)
            return result

        return called

    def _look(self, event: EventEnum, receiver: str | None, engine: Engine) -> None:
        state = engine.state
        if state.iteration < self.since:
            return
        of_update = event in OF_UPDATES
        here = state.iteration, event.name, state.update.name if of_update else None, state.shard, receiver
        self._counts[here] = occurrence = self._counts.get(here, 0) + 1
        things = (*_KEPT, *(("output", "loss") if of_update else ()), *(("batch",) if state.batch is not None else ()))
        self.found.append(Step(*here, occurrence, digests_of(engine, things, by_tensor=True).read()))
        if self._complete and event in (Events.ITERATION_STARTED, Events.GET_BATCH_STARTED):
            raise Stopped
        # With shards, there are batches within the iteration, too.
        self._complete = (event is Events.ITERATION_COMPLETED and state.iteration >= self.until) or self._complete


def _name_of(connection: Connection) -> str:
    """The name of a receiver: that of the handler and its method, or that of a function without what differs by process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(connection))


class Recorded(NamedTuple):
    """The steps of a run, and the error that ended it, in a line; None if there was none."""

    steps: list[Step]
    error: str | None


def record_steps(engine: Engine, run: Callable[[Engine], object], *, since: int, until: int) -> Recorded:
    """Run an engine, and record its steps from one iteration to another."""
    steps = _Steps(engine, since, until)
    try:
        _run(engine, run)
    except Exception as error:
        return Recorded(steps.found, in_short(error))
    return Recorded(steps.found, None)


def _run(engine: Engine, run: Callable[[Engine], object]) -> None:
    engine.dry_run, engine.findings.prints = True, False
    with warnings.catch_warnings(), suppress(Stopped):
        warnings.simplefilter("ignore")  # the run has said it when it was made first
        run(engine)


class Operation(NamedTuple):
    """An operation of torch.

    Attributes:
        name: Its name, such as "aten.mm.default".
        module: The module whose forward calls it, by its path; empty outside of the modules' forwards.
        given: The digest of its arguments.
        result: The digest of its results, and of its arguments afterwards, which it may change; empty where nothing is known.
    """

    name: str
    module: str
    given: str
    result: str

    def same(self, other: Operation | None) -> bool:
        """Whether another run makes the same, in whatever module."""
        return other is not None and (self.name, self.given, self.result) == (other.name, other.given, other.result)


class _Operations(TorchDispatchMode):
    """Records the operations that are called.

    The memory of an empty tensor has whatever was in it. Only an operation that reads it depends on that: not the one that makes
    it, one that makes a view of it, or one that fills it, as dropout does.
    """

    def __init__(self, modules: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []
        self._modules = modules
        self._empty: set[StorageWeakRef | None] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        shared = _shared(func, args, kwargs)
        unread = {id(one) for one in shared if _memory(one) in self._empty}
        given = _digest(_without([args, kwargs], unread))
        result = func(*args, **kwargs)
        known = not _makes_empty(func) and not (func.is_view and unread)
        self._follow(func, shared, result)
        left = _digest([result, args]) if known else ""
        self.found.append(Operation(str(func), self._modules[-1] if self._modules else "", given, left))
        return result

    def _follow(self, func: Any, shared: list[Tensor], result: Any) -> None:
        """Know the empty memory that an operation makes, and forget what it fills."""
        if _makes_empty(func):
            self._empty.update(_memory(one) for one in tensors_in(result))
            self._empty.discard(None)
        elif not func.is_view:
            self._empty.difference_update(_memory(one) for one in shared if _is_whole(one))


def _makes_empty(func: Any) -> bool:
    return "empty" in func._schema.name


def _shared(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments whose memory an operation writes to or shares; of one that makes memory, all, because it reads none."""
    if _makes_empty(func):
        return tensors_in([args, kwargs])
    given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}
    names = [one.name for one in func._schema.arguments if one.alias_info is not None]
    return tensors_in([given.get(name) for name in names])


def _memory(tensor: Tensor) -> StorageWeakRef | None:
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else None


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    return tensor.layout is torch.strided and tensor.nbytes == tensor.untyped_storage().nbytes()


def _without(values: Any, unread: set[int]) -> Any:
    """Values with nothing but the dtypes and the shapes of the tensors that are not read."""
    return tree_map_only(Tensor, lambda one: one.to("meta") if id(one) in unread else one, values) if unread else values


def _digest(value: Any) -> str:
    digests = Digests()
    digests.add("value", value)
    return digests.read()["value"]


def record_operations(engine: Engine, run: Callable[[Engine], object], *, begin: Step, end: Step) -> list[Operation]:
    """Run an engine, and record the operations between two of its steps, at which no receiver was called; it ends there."""
    path: list[str] = []
    operations, recording = _Operations(path), ExitStack()
    reached = {begin.event: 0, end.event: 0}

    def reaches(step: Step, engine: Engine) -> bool:
        state = engine.state
        name = None if step.update is None else state.update.name
        if (state.iteration, name, state.shard) != (step.iteration, step.update, step.shard):
            return False
        reached[step.event] += 1
        return reached[step.event] == step.occurrence

    def enter(engine: Engine) -> None:
        if reaches(begin, engine):
            recording.enter_context(operations)

    def leave(engine: Engine) -> None:
        if reaches(end, engine):
            recording.close()
            raise Stopped

    engine.connect(Events[begin.event], enter, phase=Phase.PERSIST, rank=-_FIRST)
    engine.connect(Events[end.event], leave, phase=Phase.PREPARE, rank=_FIRST)
    with _paths(engine, path), recording:
        _run(engine, run)
    return operations.found


@contextmanager
def _paths(engine: Engine, path: list[str]) -> Iterator[None]:
    """Keep the paths of the modules whose forwards are being computed in a list."""
    handles = []
    for root, module in engine.modules.items():
        for name, part in module.named_modules(prefix=root):
            handles.append(part.register_forward_pre_hook(partial(_enter, path, name)))
            handles.append(part.register_forward_hook(partial(_leave, path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(path: list[str], name: str, module: nn.Module, inputs: Any) -> None:
    path.append(name)


def _leave(path: list[str], module: nn.Module, inputs: Any, output: Tensor) -> None:
    path.pop()
