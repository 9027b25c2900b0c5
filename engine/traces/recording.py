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
from torch.utils._python_dispatch import TorchDispatchMode

from ..authoring.batches import tensors_in
from ..core.connection import Connection, Phase, Receiver
from ..core.events import EventEnum, Events
from ..core.signals import Signal
from .contents import contents_of, digests_of
from .digests import Digests
from .scripts import in_short

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["OF_UPDATES", "Operation", "Operations", "Recorded", "Step", "Stopped", "record_operations", "record_steps"]

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
        self.found.append(
            Step(*here, occurrence, digests_of(contents_of(engine, _things(engine, of_update)), by_tensor=True).read())
        )
        if self._complete and event in (Events.ITERATION_STARTED, Events.GET_BATCH_STARTED):
            raise Stopped
        # With shards, there are batches within the iteration, too.
        self._complete = (event is Events.ITERATION_COMPLETED and state.iteration >= self.until) or self._complete


def _things(engine: Engine, of_update: bool) -> tuple[str, ...]:
    """What there is to compare at an event, which may be one of an update."""
    return (*_KEPT, *(("output", "loss") if of_update else ()), *(("batch",) if engine.state.batch is not None else ()))


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
        result: The digest of its results, and of the arguments that it writes to, afterwards.
        kind: "memory" for one that makes memory or shares that of an argument, "part" for one that fills a part of an argument,
            "computes" for others.
    """

    name: str
    module: str
    given: str
    result: str
    kind: str

    def same(self, other: Operation | None) -> bool:
        """Whether another run makes the same, in whatever module: arguments without an effect on the result may differ."""
        return other is not None and self.name == other.name and (self.kind == "memory" or self.result == other.result)


class Operations(NamedTuple):
    """The operations between two steps of a run, and the digests of what they leave."""

    found: list[Operation]
    left: Mapping[str, str]


class _Operations(TorchDispatchMode):
    """Records the operations that are called.

    Args:
        modules: The paths of the modules whose forwards are being computed.
        byte: What fills the memory of ``torch.empty``, which would otherwise have whatever was in it.
    """

    def __init__(self, modules: list[str], byte: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []
        self._modules, self._byte = modules, byte

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        given = _digest([args, kwargs])
        result = func(*args, **kwargs)
        if "empty" in func._schema.name:
            for one in tensors_in(result):
                _fill(one, self._byte)
        left = _digest([result, _written(func, args, kwargs)])
        module = self._modules[-1] if self._modules else ""
        self.found.append(Operation(str(func), module, given, left, _kind(func)))
        return result


_FILLS_A_PART = frozenset(
    (
        "index_put_",
        "_index_put_impl_",
        "index_copy_",
        "index_fill_",
        "masked_fill_",
        "masked_scatter_",
        "put_",
        "scatter_",
    )
)


def _kind(func: Any) -> str:
    name = func._schema.name.removeprefix("aten::")
    if "empty" in name or name in ("resize_", "set_") or func.is_view or torch.Tag.inplace_view in func.tags:
        return "memory"
    return "part" if name in _FILLS_A_PART else "computes"


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}
    names = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return tensors_in([given.get(name) for name in names])


def _fill(tensor: Tensor, byte: int) -> None:
    if tensor.layout is torch.strided and not tensor.is_meta:
        tensor.untyped_storage().fill_(byte)  # type: ignore[attr-defined]


def _digest(value: Any) -> str:
    digests = Digests()
    digests.add("value", value)
    return digests.read()["value"]


def record_operations(
    engine: Engine, run: Callable[[Engine], object], *, begin: Step, end: Step, byte: int = 0
) -> Operations:
    """Run an engine, and record the operations between two of its steps, at which no receiver was called; it ends there.

    The memory of ``torch.empty`` is filled with a byte there.
    """
    path: list[str] = []
    operations, recording, left = _Operations(path, byte), ExitStack(), dict[str, str]()
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
            left.update(digests_of(contents_of(engine, _things(engine, end.update is not None))).read())
            raise Stopped

    engine.connect(Events[begin.event], enter, phase=Phase.PERSIST, rank=-_FIRST)
    engine.connect(Events[end.event], leave, phase=Phase.PREPARE, rank=_FIRST)
    with _paths(engine, path), recording:
        _run(engine, run)
    return Operations(operations.found, left)


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
