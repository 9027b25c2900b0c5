"""Signals: blinker signals whose receivers run in an explicit order.

Stock blinker keeps its receivers in a set of ids: their order depends on memory addresses, so that two runs of one script
can train different models. It holds receivers weakly, so that lambdas are lost, and selects the receivers on every send.
`Signal` keeps blinker's interface and bookkeeping and adds phases, strong references, and a plan of calls that is recomputed
only when connections change.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Callable, Collection, Generator, Hashable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import blinker
from blinker import ANY

from .connection import Connection, Phase, Plan, Receiver, check_place, do_nothing
from .events import NEVER, EventEnum, Events, Filter, check_receiver

if TYPE_CHECKING:
    from .kernel import Kernel

__all__ = ["Around", "Listeners", "Signal", "SignalGroup"]

F = TypeVar("F", bound=Receiver)
Around = Callable[["Signal", Connection], Receiver]
_key = attrgetter("key")


class Signal(blinker.NamedSignal):
    """One event of one engine: a blinker signal with phases, strong references and a cached plan.

    `connect`, `disconnect`, `connected_to`, `muted`, `receivers` and `send` are blinker's. The engine calls `emit`, which is
    `send` without collecting results, and only when `due` shows that a receiver may have to run.

    Attributes:
        due: Smallest count at which a receiver may have to run; `NEVER` without receivers.
        fired: Number of emissions, for events that are counted by them.
        repeats: A count that comes again, since its iteration was not made.
        askers: The receivers that asked for a stop at that count. Those with a filter on counts are not called for it again. None
            stands for all: they were called, and no batch came.
        around: The wrapper set by `Bus.call_through`.
        cut: Where an error cut an emission short, until `take_cut`: the error's id, the plan, the place in it, and whether the
            receiver there had begun.
        awaited: Whether the engine waits for the event, which makes it due without receivers; see `wait`.
    """

    __slots__ = (
        "_alike",
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
        "_shown",
        "around",
        "askers",
        "awaited",
        "cut",
        "due",
        "event",
        "fired",
        "group",
        "repeats",
    )

    def __init__(self, event: EventEnum) -> None:
        self.event = event
        self.fired = 0
        self.repeats: int | None = None
        self.askers: set[Connection] | None = None
        self.due = NEVER
        self.group: weakref.ref[SignalGroup] | None = None
        self.around: Around | None = None
        self.awaited = False
        self.cut: tuple[int, Plan, int, bool] | None = None
        self._once_a_count = event is Events.ITERATION_COMPLETED
        self._muted = False
        self._last_phase = Phase.PERSIST
        self._connections: tuple[Connection, ...] = ()
        self._shown: tuple[Connection, ...] = ()  # those of them that are not internal
        self._alike: dict[Hashable, list[Connection]] = {}  # by `Connection.kind`
        self._plan = Plan([], [])  # the connections without a filter on counts
        self._filtered: list[tuple[Connection, Filter]] = []  # those with one
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
                f"{self.event}: sender={sender!r}: signals take no sender, because each signal belongs to one engine; "
                "connect to that engine's signal"
            )
        if weak:
            raise ValueError(
                f"{self.event}: weak=True is not supported, because lambdas and closures would be collected "
                "immediately; disconnect the receiver when it is no longer needed"
            )
        check_receiver(receiver, str(self.event))
        connection = Connection(receiver, check_place(str(self.event), phase, rank), rank, filter, owner)
        if not any(connection.same(other) for other in self.like(connection)):
            self.add(connection)
        return receiver

    def add(self, *connections: Connection) -> None:
        """Insert connections at their places in the order."""
        ordered = list(self._connections)
        for connection in connections:
            insort(ordered, connection, key=_key)
            self._alike.setdefault(connection.kind, []).append(connection)
            if not connection.internal:
                super().connect(connection.receiver, weak=False)
        self._connections = tuple(ordered)
        self._new_plans()

    def remove(self, connection: Connection) -> None:
        """Undo one `add`; the receiver may stay connected under another filter or phase."""
        self._replan(tuple(one for one in self._connections if one is not connection))
        if not any(one.of(connection.receiver) for one in self.like(connection)):
            super().disconnect(connection.receiver)

    def disconnect(self, receiver: Receiver, sender: Any = ANY) -> None:
        """Remove every connection of ``receiver`` to this event, whatever its filter and phase."""
        if sender is not ANY:
            raise ValueError(f"{self.event}: sender={sender!r}: signals take no sender; omit the argument")
        removed = [one for one in self._connections if one.of(receiver)]
        self._replan(tuple(one for one in self._connections if one not in removed))
        for connection in removed:  # a built-in method is another object at each access
            super().disconnect(connection.receiver)

    def _clear_state(self) -> None:
        super()._clear_state()
        self._replan(())

    def has(self, receiver: object) -> bool:
        """Whether this receiver is connected, with any filter and phase."""
        return any(connection.of(receiver) for connection in self._connections)

    def like(self, connection: Connection) -> list[Connection]:
        """The connections of the same function, or of functions of the same name."""
        return self._alike.get(connection.kind, [])

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The connections of handlers and users in the order in which they run; not those of the engine's own services."""
        return self._shown

    @property
    def is_connected(self) -> bool:
        """Whether anybody is connected, the engine's own services included."""
        return bool(self._connections)

    @property
    def is_muted(self) -> bool:
        """Whether all receivers but those of services are disabled; set by blinker's ``muted()``."""
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
            return tuple([one for one in connections if one.internal])
        if self._last_phase is Phase.PERSIST:
            return connections
        return tuple(one for one in connections if one.phase <= self._last_phase)

    def _replan(self, connections: tuple[Connection, ...]) -> None:
        # A plan that is executing is kept: added receivers are first called at the next emission, removed ones are silenced.
        active = set(self._active(connections))
        for reference in self._plans:
            if (plan := reference()) is not None:
                plan.silence(active)
        self._connections = connections
        self._alike = {}
        for one in connections:
            self._alike.setdefault(one.kind, []).append(one)
        self._new_plans()

    def _new_plans(self) -> None:
        active = self._active(self._connections)
        self._shown = tuple([one for one in self._connections if not one.internal])
        self._selected, self._passing = None, []
        self._filtered = [(one, one.filter) for one in active if one.filter is not None and one.filter.counts]
        self._plan = self._new_plan([one for one in active if one.filter is None or not one.filter.counts])
        # 0: `_select` runs at the next count, whatever it is, and computes the one after it.
        self._filtered_due = 0 if self._filtered else NEVER
        first = [chosen.next_due(1) for _, chosen in self._filtered]
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

    def rewind(self, engine: Kernel) -> None:
        """Recompute everything that depends on counts, after they were reset or loaded."""
        if self._filtered:
            self.replan()
        for connection in self._connections:
            connection.restart(engine)

    # ---- sending --------------------------------------------------------------------------------------------------

    def emit(
        self,
        engine: Kernel,
        count: int | None,
        owner: str | None = None,
        phases: Collection[Phase] | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Call the receivers in order. The first error skips the others and is raised with a note that names its receiver.

        Every receiver is called from here, so that notes and profiles are complete.

        Args:
            engine: Argument of each receiver.
            count: Count that filters are compared with; None calls only receivers without a filter.
            owner: Name of a handler, to call only its receivers.
            phases: Phases whose receivers are called; all by default.
            plan: The calls themselves, in place of the selection.
        """
        receiver: Receiver | None = None
        try:
            if count is None or owner is not None or phases is not None:
                plan = self._subset(count, owner, phases) if plan is None else plan
            else:
                plan = self._plan if count < self._filtered_due else self._select(count)
            for receiver in plan:
                plan.current = receiver
                receiver(engine)
            plan.current = None
        except BaseException as error:
            if plan is None:  # an interrupt came before the receivers were selected
                plan = self._select(count or 0)
            plan.current = None
            connection = plan.connection(receiver)
            if connection is not None:  # else an interrupt came before the first receiver
                self._add_note(error, connection, engine)
            begun = (
                error.__traceback__ is not None and error.__traceback__.tb_next is not None
            )  # not between two receivers
            self.cut = id(error), plan, plan.place(receiver), begun
            raise

    def emit_rest(self, engine: Kernel, calls: list[tuple[Connection, Receiver]]) -> None:
        """Call the receivers that are left of an emission that an error cut short."""
        plan = self._remember(Plan([connection for connection, _ in calls], [call for _, call in calls]))
        self.emit(engine, None, plan=plan)

    def take_cut(self, error: BaseException) -> tuple[Plan, int, bool] | None:
        """Where an error, or one that it was raised from, cut an emission short, and forget it; None if it did not."""
        cut, self.cut = self.cut, None
        while cut is not None and error is not None:
            if cut[0] == id(error):
                return cut[1:]
            error = error.__cause__ or error.__context__  # type: ignore[assignment]
        return None

    def executing(self) -> tuple[Signal, Plan, int] | None:
        """The signal, the plan and the place in it, if a receiver is being called."""
        for reference in self._plans:
            if (plan := reference()) is not None and plan.current is not None:
                return self, plan, plan.place(plan.current)
        return None

    def emit_to_all(self, engine: Kernel) -> list[BaseException]:
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
        plan = self._select(self.count(sender) if self._shown else 0)
        pairs = zip(plan, plan.connections, strict=True)
        shown = [(call, one) for call, one in pairs if call is not do_nothing and not one.internal]
        return [(one.receiver, call(sender, **kwargs)) for call, one in shown]

    def receivers_for(self, sender: Any) -> Generator[Receiver, None, None]:
        """Yield the receivers in order, checking each ``when=`` just before; for ``send_async``."""
        plan = self._select(self.count(sender) if self._shown else 0)
        for call, connection in zip(plan, plan.connections, strict=True):
            if (
                call is not do_nothing
                and not connection.internal
                and (connection.when is None or connection.when(sender))
            ):
                yield connection.receiver

    def count(self, engine: Kernel) -> int:
        """The count that the event's filters are compared with."""
        if not hasattr(engine, "state"):
            raise TypeError(f"{self.event}: send({engine!r}): the sender must be the engine; call send(engine)")
        counter = self.event.counter
        if callable(counter):
            return counter(engine)
        if counter == "fired":
            return self.fired
        return 0 if counter is None else int(getattr(engine.state, counter))

    def repeat(self, count: int) -> None:
        """Note that a count comes again; nobody has asked for that yet."""
        if self.repeats != count:
            self.repeats, self.askers = count, set()

    def names_of_askers(self) -> list[str]:
        """The `askers` by their places among the connections and their names, as a state keeps them."""
        return [f"{place} {one!r}" for place, one in enumerate(self._connections) if one in (self.askers or ())]

    def find_askers(self, names: list[str] | None) -> None:
        """Find the `askers` of a state again."""
        found = {one for place, one in enumerate(self._connections) if f"{place} {one!r}" in (names or ())}
        self.askers = None if names is None else found

    def forget_repeats(self) -> None:
        """Let every count be new."""
        self.repeats = self.askers = None

    def _select(self, count: int) -> Plan:
        """The plan for this count; also computes when a filter passes next."""
        if count == self.repeats and self.askers is None:
            return self._plan
        passed = self.askers or () if count == self.repeats else ()
        passing, following = [], NEVER
        for connection, chosen in self._filtered:
            due = chosen.next_due(count + 1 if connection in passed else count)
            if due <= count:
                passing.append(connection)
                # Other events stay due: several updates or time chunks may emit them again at this count.
                if self._once_a_count:
                    due = chosen.next_due(count + 1)
            if due < following:
                following = due
        # A user's counter may restart at any time, so that nothing can be predicted from it.
        self._filtered_due = 0 if callable(self.event.counter) else following
        self._set_due(0 if self._plan else self._filtered_due)
        if not passing:
            return self._plan
        if self._selected is None or self._passing != passing:  # usually the same ones pass as last time
            self._passing, self._selected = passing, self._plan_with(passing)
        return self._selected

    def _plan_with(self, passing: list[Connection]) -> Plan:
        """The plan of the connections without a filter on counts, and of these."""
        omitted = {one for one, _ in self._filtered}.difference(passing)
        return self._new_plan([one for one in self._active(self._connections) if one not in omitted])

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
        calls = [one.call if around is None or one.internal else around(self, one) for one in connections]
        return self._remember(Plan(connections, calls))

    def _remember(self, plan: Plan) -> Plan:
        """Note a plan that may be executing when connections are removed."""
        self._plans = [reference for reference in self._plans if reference() is not None]
        self._plans.append(weakref.ref(plan))
        return plan

    def _add_note(self, error: BaseException, connection: Connection, engine: Kernel) -> None:
        state = engine.state
        if not connection.internal:
            error.add_note(
                f"raised by {connection!r} at {self.event}, epoch {state.epoch}, iteration {state.iteration}"
            )


class Listeners(list[Connection]):
    """Who is notified of a `Lifecycle` event, in order. It has no filters, counts or plans, as a `Signal` has."""

    def __init__(self, event: EventEnum) -> None:
        super().__init__()
        self.event = event

    def add(self, *connections: Connection) -> None:
        """Insert connections at their places in the order."""
        self.extend(connections)
        self.sort(key=_key)


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
        self.due = min([signal.due for signal in self._members])

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """Skip the receivers of RECORD and later phases: gradients are recomputed, and these saw the first computation."""
        for signal in self._members:
            signal.last_phase = Phase.FINALIZE
        try:
            yield
        finally:
            for signal in self._members:
                signal.last_phase = Phase.PERSIST
