"""One connection of a receiver to an event, and the plan of calls that a signal makes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Hashable
from enum import IntEnum
from itertools import count
from types import BuiltinMethodType, FunctionType
from typing import TYPE_CHECKING, Any

from .declarations import Things
from .events import Filter
from .words import did_you_mean

if TYPE_CHECKING:
    from .kernel import Kernel

__all__ = [
    "Connection",
    "Phase",
    "Plan",
    "Receiver",
    "check_place",
    "do_nothing",
    "guarded",
    "is_same",
    "next_place",
]

Receiver = Callable[..., Any]
_places = count()


def next_place() -> int:
    """A place behind all that were given so far, for a handler or a function that is connected now."""
    return next(_places)


class Phase(IntEnum):
    """When a receiver runs within its event: by phase, then rank, then order of connection.

    The receivers of a handler are connected when it is attached; they keep their place while it is disabled.

    - PREPARE: prepare the inputs of this event: move to device, unscale gradients, validate (so that metrics exist)
    - CHANGE: change training; the default, also for users' functions
    - FINALIZE: last change before backward or step: scale the loss, skip a step
    - RECORD: read only: history, loggers, progress bar. Where a step computes its gradients several times, as LBFGS and
      `SharpnessAwareMinimization` do, these receivers are called for the first time only: what is recorded are the losses and
      gradients at the weights before the step
    - CONTROL: schedules, patience, stops; finally, which checkpoints to keep
    - PERSIST: write to disk; last, because a checkpoint written before CONTROL would resume with the patience and the schedule
      one step behind
    """

    PREPARE = 0
    """Prepare the inputs of this event: move to device, unscale gradients, validate (so that metrics exist)."""
    CHANGE = 1
    """Change training; the default, also for users' functions."""
    FINALIZE = 2
    """Last change before backward or step: scale the loss, skip a step."""
    RECORD = 3
    """Read only: history, loggers, progress bar."""
    CONTROL = 4
    """Schedules, patience, stops; finally, which checkpoints to keep."""
    PERSIST = 5
    """Write to disk."""


def check_place(where: str, phase: Phase, rank: int) -> Phase:
    """Raise TypeError or ValueError for what is no phase, or for a rank that is no int."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"{where}: rank={rank!r}: expected an int; in a phase, receivers run in ascending rank order")
    try:
        return Phase(phase)
    except ValueError:
        names = ", ".join(f"Phase.{one.name}" for one in Phase)
        hint = did_you_mean(str(phase).upper(), Phase.__members__)
        raise ValueError(f"{where}: phase={phase!r}: expected one of {names}{hint}") from None


class Connection:
    """One receiver with its filter, phase and rank, and what it declares: see `signalfire.on`.

    ``place`` orders receivers of equal phase and rank: all receivers of a handler have the one that it got when it was attached,
    so that they return to it whenever it is enabled again. ``internal``: whether it belongs to a service of the engine itself,
    and is not shown.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "filter",
        "internal",
        "key",
        "kind",
        "owner",
        "phase",
        "rank",
        "reads",
        "receiver",
        "repeatable",
        "when",
        "writes",
    )  # fmt: skip

    def __init__(
        self,
        receiver: Receiver,
        phase: Phase,
        rank: int,
        filter: Filter | None,
        owner: str | None,
        reads: Things | None = None,
        writes: Things | None = None,
        repeatable: bool = False,
        place: int | None = None,
        internal: bool = False,
    ) -> None:
        self.receiver = receiver
        self.phase = phase
        self.rank = rank
        self.filter = filter
        self.owner = owner
        self.reads = reads
        self.writes = writes
        self.repeatable = repeatable
        self.internal = internal
        self.key = (int(phase), rank, next_place() if place is None else place)
        self.kind = _kind(receiver)
        # The predicate of an interval stores when it passed last: each connection needs its own copy.
        self.when = None if filter is None else copy.copy(filter.when)
        self.call = receiver if self.when is None else guarded(receiver, self.when)

    def restart(self, engine: Kernel) -> None:
        """Restart a predicate that stores counts from the current ones."""
        restart = getattr(self.when, "restart", None)
        if restart is not None:
            restart(engine)

    def __repr__(self) -> str:
        name = getattr(self.receiver, "__name__", type(self.receiver).__name__)
        return name if self.owner is None else f"{self.owner}.{name}"

    @property
    def is_foreign(self) -> bool:
        """Whether it belongs to a handler or to the user, and not to the engine's own parts."""
        receiver = getattr(self.receiver, "func", self.receiver)
        return self.owner is not None or not str(getattr(receiver, "__module__", "")).startswith("signalfire.")

    def of(self, receiver: object) -> bool:
        return is_same(self.receiver, receiver)

    def same(self, other: Connection) -> bool:
        return self.of(other.receiver) and self.phase == other.phase and self.filter == other.filter


def _kind(receiver: Receiver) -> Hashable:
    """Equal for receivers that may be the same, so that only these have to be compared."""
    if inspect.ismethod(receiver):
        return id(receiver.__self__), id(receiver.__func__)
    if isinstance(receiver, BuiltinMethodType):
        return id(receiver.__self__), receiver.__name__
    if inspect.isfunction(receiver):
        return receiver.__qualname__, *_captured(receiver), *map(id, receiver.__defaults__ or ())
    return id(receiver)


def _captured(function: FunctionType) -> list[int]:
    """The identities of what a function captures: of numbers and text the variable's, which it may count in."""
    found = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            value = None
        found.append(id(cell) if value is None or isinstance(value, int | float | str) else id(value))
    return found


def guarded(receiver: Receiver, when: Callable[[Any], object]) -> Receiver:
    def call(engine: Kernel, **kwargs: Any) -> Any:
        return receiver(engine, **kwargs) if when(engine) else None

    return call


class Plan(list[Receiver]):
    """The precomputed calls of a signal, and the connection of each.

    A list of bound methods is the cheapest to call: 35 ns a receiver; objects with a ``__call__`` take two to four times as long.
    """

    __slots__ = ("__weakref__", "calls", "connections", "current")

    def __init__(self, connections: list[Connection], calls: list[Receiver]) -> None:
        super().__init__(calls)
        self.connections = connections
        self.calls = calls  # the original calls: `silence` replaces those of removed connections in the list itself
        self.current: Receiver | None = None  # the one that is being called

    def connection(self, call: Receiver | None) -> Connection | None:
        """The connection that a call belongs to; None if there is none."""
        pairs = zip(self.connections, self.calls, strict=True)
        return next((connection for connection, own in pairs if own is call), None)

    def place(self, call: Receiver | None) -> int:
        """The place of a call, also of one in place of a removed connection; -1 if there is none."""
        return next((i for i, own in enumerate(self.calls) if own is call or self[i] is call), -1)

    def silence(self, connected: Collection[Connection]) -> None:
        """Disable the calls of connections that are not among ``connected``."""
        for place, connection in enumerate(self.connections):
            if connection not in connected:
                self[place] = do_nothing


def do_nothing(engine: Kernel) -> None:
    """What a plan calls in place of a connection that was removed meanwhile."""


def is_same(one: object, other: object) -> bool:
    """Whether two receivers are the same."""
    # Bound methods are new objects at each access and are compared by value; anything else by identity, as in blinker.
    if one is other:
        return True
    if inspect.ismethod(one) and inspect.ismethod(other):
        return one == other
    # Built-in methods, such as `list.append`, compare the contents of their objects.
    return (
        isinstance(one, BuiltinMethodType)
        and isinstance(other, BuiltinMethodType)
        and one.__self__ is other.__self__
        and one.__name__ == other.__name__
    )
