"""The bus: blinker signals whose receivers run in an explicit order.

Stock blinker keeps its receivers in a set of ids: their order depends on memory addresses, so that two runs of one script
can train different models. It holds receivers weakly, so that lambdas are lost, and selects the receivers on every send.
`Signal` keeps blinker's interface and bookkeeping and adds phases, strong references, and a plan of calls that is recomputed
only when connections change.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from bisect import insort
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import blinker
from blinker import ANY

from .events import NEVER, AnyEvent, EventEnum, Events, Filter, check_receiver, resolve

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Bus", "Connection", "Phase", "Receiver", "Signal"]

Receiver = Callable[..., Any]
F = TypeVar("F", bound=Receiver)
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
    """One receiver with its filter, phase and rank."""

    __slots__ = ("call", "filter", "key", "owner", "phase", "rank", "receiver", "when")

    def __init__(self, receiver: Receiver, phase: Phase, rank: int, filter: Filter | None, owner: str | None) -> None:
        self.receiver = receiver
        self.phase = phase
        self.rank = rank
        self.filter = filter
        self.owner = owner
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
        return _is(self.receiver, receiver)

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
                self[place] = _do_nothing


def _do_nothing(engine: Engine) -> None:
    pass


Around = Callable[["Signal", Connection], Receiver]


class Signal(blinker.NamedSignal):
    """One event of one engine: a blinker signal with phases, strong references and a cached plan.

    `connect`, `disconnect`, `connected_to`, `muted`, `receivers` and `send` are blinker's. The engine calls `emit`, which is
    `send` without collecting results, and only when `due` shows that a receiver may have to run.

    Attributes:
        due: Smallest count at which a receiver may have to run; `NEVER` without receivers.
        fired: Number of emissions, for events that are counted by them.
        around: The wrapper set by `Bus.call_through`.
        awaited: Whether the engine waits for the event, which makes it due without receivers; see `wait`.
    """

    __slots__ = (
        "_connections",
        "_filtered",
        "_filtered_due",
        "_last_phase",
        "_muted",
        "_once_a_count",
        "_passing",
        "_plan",
        "_plans",
        "_selected",
        "around",
        "awaited",
        "due",
        "event",
        "fired",
        "group",
    )

    def __init__(self, event: EventEnum) -> None:
        self.event = event
        self.fired = 0
        self.due = NEVER
        self.group: weakref.ref[SignalGroup] | None = None
        self.around: Around | None = None
        self.awaited = False
        self._once_a_count = event is Events.ITERATION_COMPLETED
        self._muted = False
        self._last_phase = Phase.PERSIST
        self._connections: tuple[Connection, ...] = ()
        self._plan = Plan([], [])  # the connections without a filter on counts
        self._filtered: list[Connection] = []  # those with one
        self._passing: list[Connection] = []  # the filtered ones that passed in the last selection
        self._selected: Plan | None = None  # the plan of that selection
        self._plans: list[weakref.ref[Plan]] = []  # plans that may be executing
        self._filtered_due = NEVER
        super().__init__(event.label)

    # ---- connecting -----------------------------------------------------------------------------------------------

    def connect(
        self,
        receiver: F,
        sender: Any = ANY,
        weak: bool = False,
        *,
        phase: Phase = Phase.CHANGE,
        rank: int = 0,
        filter: Filter | None = None,
        owner: str | None = None,
    ) -> F:
        """Call ``receiver(engine)`` at this event. Connecting it again with the same phase and filter changes nothing.

        Raises:
            TypeError: for a coroutine or generator function, or one that cannot be called as ``receiver(engine)``.
            ValueError: for ``weak=True``, or a ``sender``.
        """
        if sender is not ANY:
            raise ValueError(
                f"{self.event}: sender={sender!r}: signals belong to one engine and take no sender; connect to the signal "
                "of that engine"
            )
        if weak:
            raise ValueError(
                f"{self.event}: weak=True is not supported, since lambdas and closures would be collected at once; "
                "disconnect the receiver when it is no longer needed"
            )
        check_receiver(receiver, str(self.event))
        connection = Connection(receiver, Phase(phase), rank, filter, owner)
        if not any(connection.same(other) for other in self._connections):
            self.add(connection)
        return receiver

    def add(self, connection: Connection) -> None:
        """Insert a connection at its place in the order."""
        ordered = list(self._connections)
        insort(ordered, connection, key=lambda one: one.key)
        self._replan(tuple(ordered))
        super().connect(connection.receiver, weak=False)

    def remove(self, connection: Connection) -> None:
        """Undo one `add`; the receiver may stay connected under another filter or phase."""
        self._replan(tuple(one for one in self._connections if one is not connection))
        if not any(one.of(connection.receiver) for one in self._connections):
            super().disconnect(connection.receiver)

    def disconnect(self, receiver: Receiver, sender: Any = ANY) -> None:
        """Remove every connection of ``receiver`` to this event, whatever its filter and phase."""
        if sender is not ANY:
            raise ValueError(f"{self.event}: sender={sender!r}: signals take no sender; omit the argument")
        self._replan(tuple(one for one in self._connections if not one.of(receiver)))
        super().disconnect(receiver)

    def _clear_state(self) -> None:
        super()._clear_state()
        self._replan(())

    def has(self, receiver: object) -> bool:
        """Whether this receiver is connected, with any filter and phase."""
        return any(connection.of(receiver) for connection in self._connections)

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The connections in the order in which they run."""
        return self._connections

    @property
    def is_muted(self) -> bool:
        """Whether all receivers are disabled; set by blinker's ``muted()``."""
        return self._muted

    @is_muted.setter
    def is_muted(self, muted: bool) -> None:
        self._muted = muted
        self._replan(self._connections)

    @property
    def last_phase(self) -> Phase:
        """The last phase whose receivers are called."""
        return self._last_phase

    @last_phase.setter
    def last_phase(self, phase: Phase) -> None:
        if phase is not self._last_phase:
            self._last_phase = phase
            if self._connections:
                self._replan(self._connections)

    def _active(self, connections: tuple[Connection, ...]) -> tuple[Connection, ...]:
        if self._muted:
            return ()
        if self._last_phase is Phase.PERSIST:
            return connections
        return tuple(one for one in connections if one.phase <= self._last_phase)

    def _replan(self, connections: tuple[Connection, ...]) -> None:
        # A plan that is executing is kept: added receivers are first called at the next emission, removed ones are silenced.
        active = self._active(connections)
        for reference in self._plans:
            if (plan := reference()) is not None:
                plan.silence(active)
        self._selected, self._passing = None, []
        self._connections = connections
        self._filtered = [one for one in active if one.filter is not None and one.filter.counts]
        self._plan = self._new_plan([one for one in active if one not in self._filtered])
        # 0: `_select` runs at the next count, whatever it is, and computes the one after it.
        self._filtered_due = 0 if self._filtered else NEVER
        first = [chosen.next_due(1) for one in self._filtered if (chosen := one.filter) is not None]
        self._set_due(0 if self._plan else min(first, default=NEVER))

    def _set_due(self, due: int) -> None:
        before, self.due = self.due, due
        if self.awaited:  # read last: a signal handler that calls `wait` may have interrupted this method
            due = self.due = 0
        if due != before and self.group is not None and (group := self.group()) is not None:
            if due < group.due:
                group.due = due
            elif before == group.due:  # otherwise another signal is due first
                group.refresh()

    def wait(self, waiting: bool) -> None:
        """Make the event due without receivers, or undo that. May be called at any time, also from a SIGTERM handler.

        One comparison then covers receivers and everything else that waits for the event, which saves 14 of the 305 ns of an
        empty iteration.
        """
        self.awaited = waiting
        self._set_due(0 if self._plan else self._filtered_due)

    def replan(self) -> None:
        """Recompute the plan of calls."""
        self._replan(self._connections)

    def rewind(self, engine: Engine) -> None:
        """Recompute everything that depends on counts, after they were reset or loaded."""
        if self._filtered:
            self.replan()
        for connection in self._connections:
            connection.restart(engine)

    # ---- sending --------------------------------------------------------------------------------------------------

    def emit(
        self, engine: Engine, count: int | None, owner: str | None = None, phases: Collection[Phase] | None = None
    ) -> None:
        """Call the receivers in order. The first error skips the others and is raised with a note that names its receiver.

        Every receiver is called from here, so that notes and profiles are complete.

        Args:
            engine: Argument of each receiver.
            count: Count that filters are compared with; None calls only receivers without a filter.
            owner: Name of a handler, to call only its receivers.
            phases: Phases whose receivers are called; all by default.
        """
        if count is None or owner is not None or phases is not None:
            plan = self._subset(count, owner, phases)
        else:
            plan = self._plan if count < self._filtered_due else self._select(count)
        receiver: Receiver | None = None
        try:
            for receiver in plan:
                receiver(engine)
        except BaseException as error:
            connection = plan.connection(receiver)
            if connection is not None:  # else an interrupt came before the first receiver
                self._add_note(error, connection, engine)
            raise

    def emit_to_all(self, engine: Engine) -> list[BaseException]:
        """Call every receiver even if some raise, and return the errors: for cleaning up."""
        errors: list[BaseException] = []
        plan = self._select(0)
        for call, connection in zip(plan, plan.connections, strict=True):
            try:
                call(engine)
            except BaseException as error:
                self._add_note(error, connection, engine)
                errors.append(error)
        return errors

    def send(self, sender: Any = None, /, *, _async_wrapper: Any = None, **kwargs: Any) -> list[tuple[Receiver, Any]]:
        """Call the receivers in order and return (receiver, result) pairs, as blinker does.

        ``sender`` is the engine: counts are read from it, and filters apply as in a run.
        """
        plan = self._select(self.count(sender) if self._connections else 0)
        pairs = zip(plan, plan.connections, strict=True)
        return [(one.receiver, call(sender, **kwargs)) for call, one in pairs if call is not _do_nothing]

    def receivers_for(self, sender: Any) -> Generator[Receiver, None, None]:
        """Yield the receivers in order, checking each ``when=`` just before; for ``send_async``."""
        plan = self._select(self.count(sender) if self._connections else 0)
        for call, connection in zip(plan, plan.connections, strict=True):
            if call is not _do_nothing and (connection.when is None or connection.when(sender)):
                yield connection.receiver

    def count(self, engine: Engine) -> int:
        """The count that the event's filters are compared with."""
        if not hasattr(engine, "state"):
            raise TypeError(f"{self.event}: sent by {engine!r}; the sender must be the engine: signal.send(engine)")
        counter = self.event.counter
        if callable(counter):
            return counter(engine)
        if counter == "fired":
            return self.fired
        return 0 if counter is None else int(getattr(engine.state, counter))

    def _select(self, count: int) -> Plan:
        """The plan for this count; also computes when a filter passes next."""
        passing, following = [], NEVER
        for connection in self._filtered:
            assert connection.filter is not None
            due = connection.filter.next_due(count)
            if due <= count:
                passing.append(connection)
                # Other events stay due: several updates or time chunks may emit them again at this count.
                if self._once_a_count:
                    due = connection.filter.next_due(count + 1)
            if due < following:
                following = due
        # A user's counter may restart at any time, so that nothing can be predicted from it.
        self._filtered_due = 0 if callable(self.event.counter) else following
        self._set_due(0 if self._plan else self._filtered_due)
        if not passing:
            return self._plan
        if self._selected is None or self._passing != passing:  # usually the same ones pass as last time
            self._passing = passing
            omitted = [one for one in self._filtered if one not in passing]
            self._selected = self._new_plan([one for one in self._active(self._connections) if one not in omitted])
        return self._selected

    def _subset(self, count: int | None, owner: str | None, phases: Collection[Phase] | None) -> Plan:
        """The plan for this count, restricted to one handler, to some phases, or both."""
        connections = self._plan.connections if count is None else self._select(count).connections
        return self._new_plan(
            [
                one
                for one in connections
                if (owner is None or one.owner == owner)
                and (phases is None or one.phase in phases)
                and (count is not None or one.filter is None)
            ]
        )

    def _new_plan(self, connections: list[Connection]) -> Plan:
        around = self.around
        calls = [one.call if around is None else around(self, one) for one in connections]
        plan = Plan(connections, calls)
        self._plans = [reference for reference in self._plans if reference() is not None]
        self._plans.append(weakref.ref(plan))
        return plan

    def _add_note(self, error: BaseException, connection: Connection, engine: Engine) -> None:
        state = engine.state
        error.add_note(f"raised by {connection!r} at {self.event}, epoch {state.epoch}, iteration {state.iteration}")


def _is(one: object, other: object) -> bool:
    # Bound methods are new objects at each access and are compared by value; anything else by identity, as in blinker.
    return one is other or (inspect.ismethod(one) and inspect.ismethod(other) and one == other)


class SignalGroup:
    """Signals with one common ``due``: a single comparison shows that none of them has a receiver to call.

    Attributes:
        due: Smallest ``due`` of the signals.
    """

    __slots__ = ("__weakref__", "_members", "due")

    def __init__(self, *members: Signal) -> None:
        self._members = members
        for signal in members:
            signal.group = weakref.ref(self)
        self.refresh()

    def refresh(self) -> None:
        self.due = min(signal.due for signal in self._members)

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """Skip the receivers of RECORD and later phases: gradients are computed again, and these have seen the first time."""
        for signal in self._members:
            signal.last_phase = Phase.FINALIZE
        try:
            yield
        finally:
            for signal in self._members:
                signal.last_phase = Phase.PERSIST


class Bus(blinker.Namespace):
    """The signals of one engine by name; a blinker namespace.

    Attributes:
        around: The wrapper set by `call_through`.
        between_events: Called before and after every event that `emit` emits.
    """

    around: Around | None = None

    def __init__(self) -> None:
        super().__init__()
        self._catalogues: set[type[EventEnum]] = {Events}
        self.between_events: Callable[[], None] = _nothing

    def register(self, catalogue: type[EventEnum]) -> None:
        """Register a catalogue of events, so that its events have signals."""
        if not (isinstance(catalogue, type) and issubclass(catalogue, EventEnum)):
            raise TypeError(f"register_events({catalogue!r}): expected a subclass of EventEnum")
        if any(other.__name__ == catalogue.__name__ and other is not catalogue for other in self._catalogues):
            raise ValueError(f"register_events({catalogue!r}): another catalogue has this name; rename one of the two")
        self._catalogues.add(catalogue)

    def of(self, event: EventEnum) -> Signal:
        """The signal of an event, created at the first request.

        Raises:
            TypeError, ValueError: for a filtered event, what is no event, or an event whose catalogue is not registered.
        """
        if not isinstance(event, EventEnum):
            resolve(event)
            raise TypeError(f"{event} is filtered; only an event without a filter has a signal")
        if type(event) not in self._catalogues:
            raise ValueError(
                f"{event} is not known to this engine: call engine.register_events({type(event).__name__}) first"
            )
        signal = self.get(event.full_name)
        if not isinstance(signal, Signal):
            signal = self[event.full_name] = Signal(event)
            signal.around = self.around
        return signal

    def fire(self, engine: Engine, event: EventEnum) -> None:
        """Emit an event of a user's own catalogue."""
        if type(event) is Events:
            raise ValueError(f"fire({event}): only the engine emits Events; subclass EventEnum for events of your own")
        self.emit(engine, event)

    def emit(self, engine: Engine, event: EventEnum) -> None:
        """Emit an event: count it, and call its receivers."""
        self.between_events()
        try:
            signal = self.of(event)
            signal.fired += 1
            if signal.receivers:
                signal.emit(engine, signal.count(engine))
        finally:
            self.between_events()

    def connect(
        self, engine: Engine, event: AnyEvent, receiver: Receiver, phase: Phase, rank: int
    ) -> Callable[[], None]:
        """Connect a receiver to each event of an expression; returns a function that disconnects it. See `Engine.connect`."""
        pairs = [(self.of(one), chosen) for one, chosen in resolve(event)]
        check_receiver(receiver, f"connect({event})")
        made = [(signal, Connection(receiver, Phase(phase), rank, chosen, None)) for signal, chosen in pairs]
        for signal, connection in made:
            if any(connection.same(other) for other in signal.connections):
                raise ValueError(f"{connection!r} is already connected to {signal.event} with this filter and phase")
        for signal, connection in made:
            signal.add(connection)
            connection.restart(engine)

        def disconnect() -> None:
            for signal, connection in made:
                signal.remove(connection)

        return disconnect

    def disconnect(self, receiver: Receiver) -> None:
        """Disconnect a function from all of its events."""
        connected = [signal for signal in self.all() if signal.has(receiver)]
        if not connected:
            raise ValueError(f"detach({receiver!r}): this function is not connected")
        for signal in connected:
            signal.disconnect(receiver)

    def has(self, receiver: object, event: EventEnum | None = None) -> bool:
        """Whether a function is connected to any event, or to ``event``."""
        return any(signal.has(receiver) for signal in (self.all() if event is None else [self.of(event)]))

    def call_through(self, around: Around | None) -> None:
        """Call the result of ``around(signal, connection)`` in place of every ``connection.call``; None undoes this."""
        self.around = around
        for signal in self.all():
            signal.around = around
            signal.replan()

    def all(self) -> list[Signal]:
        """Every signal created so far."""
        return [signal for signal in self.values() if isinstance(signal, Signal)]

    def reset(self) -> None:
        """Reset the count of every event."""
        for signal in self.all():
            signal.fired = 0

    def rewind(self, engine: Engine) -> None:
        """Recompute everything that depends on counts, in every signal."""
        for signal in self.all():
            signal.rewind(engine)

    def _counted(self) -> list[Signal]:
        """The signals whose counts are saved; not those of saving: a state cannot count its own save."""
        return [one for one in self.all() if one.event.counter == "fired" and one.event not in _SAVES]

    def state_dict(self) -> dict[str, int]:
        """Number of emissions of each event that is counted by them, where it is not 0."""
        counted = sorted(self._counted(), key=lambda one: str(one.event))
        return {str(one.event): one.fired for one in counted if one.fired}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for event in [event for catalogue in self._catalogues for event in catalogue if str(event) in state]:
            self.of(event)  # a receiver that is connected later counts from the first emission
        for signal in self._counted():
            signal.fired = state.get(str(signal.event), 0)

    def signal(self, name: str, doc: str | None = None) -> blinker.NamedSignal:
        """The existing signal of this name; unlike blinker's, it creates none."""
        if name not in self:
            raise KeyError(f"no signal is named {name!r}; engine.signal(event) gives the signal of an event")
        return self[name]


_SAVES = (Events.CHECKPOINT_SAVING, Events.CHECKPOINT_SAVED)


def _nothing() -> None:
    pass
