"""One connection of a receiver to an event, and the plan of calls that a signal makes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from enum import IntEnum
from itertools import count
from typing import TYPE_CHECKING, Any

from .declarations import Things
from .events import Filter

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Connection", "Phase", "Plan", "Receiver", "do_nothing", "is_same"]

Receiver = Callable[..., Any]
_connection_numbers = count()


class Phase(IntEnum):
    """When a receiver runs within its event: by phase, then rank, then order of connection.

    CHANGE is the default. RECORD only reads. CONTROL adjusts schedules and stops runs. PERSIST writes to disk; it comes last
    because a checkpoint written before CONTROL would resume with the patience and the schedule one step behind.
    """

    PREPARE = 0  # prepare the inputs of this event: move to device, unscale gradients, validate (so that metrics exist)
    CHANGE = 1  # change training; the default, also for users' functions
    FINALIZE = 2  # last change before backward or step: scale the loss, skip a step
    RECORD = 3  # read only: history, loggers, progress bar
    CONTROL = 4  # schedules, patience, stops; finally, which checkpoints to keep
    PERSIST = 5  # write to disk


class Connection:
    """One receiver with its filter, phase and rank, and what it declares to read and write (None: nothing is declared)."""

    __slots__ = ("call", "filter", "key", "owner", "phase", "rank", "reads", "receiver", "when", "writes")

    def __init__(
        self,
        receiver: Receiver,
        phase: Phase,
        rank: int,
        filter: Filter | None,
        owner: str | None,
        reads: Things | None = None,
        writes: Things | None = None,
    ) -> None:
        self.receiver = receiver
        self.phase = phase
        self.rank = rank
        self.filter = filter
        self.owner = owner
        self.reads = reads
        self.writes = writes
        self.key = (int(phase), rank, next(_connection_numbers))
        # The predicate of an interval stores when it passed last: each connection needs its own copy.
        self.when = None if filter is None else copy.copy(filter.when)
        self.call = receiver if self.when is None else _guarded(receiver, self.when)

    def restart(self, engine: Engine) -> None:
        """Restart a predicate that stores counts from the current ones."""
        restart = getattr(self.when, "restart", None)
        if restart is not None:
            restart(engine)

    def __repr__(self) -> str:
        name = getattr(self.receiver, "__name__", type(self.receiver).__name__)
        return name if self.owner is None else f"{self.owner}.{name}"

    def of(self, receiver: object) -> bool:
        return is_same(self.receiver, receiver)

    def same(self, other: Connection) -> bool:
        return self.of(other.receiver) and self.phase == other.phase and self.filter == other.filter


def _guarded(receiver: Receiver, when: Callable[[Engine], object]) -> Receiver:
    def call(engine: Engine, **kwargs: Any) -> Any:
        return receiver(engine, **kwargs) if when(engine) else None

    return call


class Plan(list[Receiver]):
    """The precomputed calls of a signal, and the connection of each.

    A list of bound methods is the cheapest to call: 35 ns a receiver; objects with a ``__call__`` take two to four times as long.
    """

    __slots__ = ("__weakref__", "calls", "connections")

    def __init__(self, connections: list[Connection], calls: list[Receiver]) -> None:
        super().__init__(calls)
        self.connections = connections
        self.calls = calls  # the original calls: `silence` replaces those of removed connections in the list itself

    def connection(self, call: Receiver | None) -> Connection | None:
        """The connection that a call belongs to; None if there is none."""
        pairs = zip(self.connections, self.calls, strict=True)
        return next((connection for connection, own in pairs if own is call), None)

    def silence(self, connected: tuple[Connection, ...]) -> None:
        """Disable the calls of connections that are not among ``connected``."""
        for place, connection in enumerate(self.connections):
            if connection not in connected:
                self[place] = do_nothing


def do_nothing(engine: Engine) -> None:
    """What a plan calls in place of a connection that was removed meanwhile."""


def is_same(one: object, other: object) -> bool:
    """Whether two receivers are the same."""
    # Bound methods are new objects at each access and are compared by value; anything else by identity, as in blinker.
    return one is other or (inspect.ismethod(one) and inspect.ismethod(other) and one == other)
