"""The bus of an engine: its signals by event, and everything that is emitted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import blinker

from .connection import Connection, Phase, Receiver, check_place
from .events import AnyEvent, EventEnum, Events, Lifecycle, check_receiver, resolve
from .signals import Around, Listeners, Signal

if TYPE_CHECKING:
    from .kernel import Kernel

__all__ = ["Bus", "Decorator"]

F = TypeVar("F", bound=Receiver)


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
        self._listeners: dict[EventEnum, Listeners] = {}
        self.between_events: Callable[[], None] = _nothing

    def register(self, catalogue: type[EventEnum]) -> None:
        """Register a catalogue of events, so that its events have signals."""
        if not (isinstance(catalogue, type) and issubclass(catalogue, EventEnum)):
            raise TypeError(f"register_events({catalogue!r}): expected a subclass of EventEnum")
        if any(other.__name__ == catalogue.__name__ and other is not catalogue for other in self._catalogues):
            raise ValueError(f"register_events({catalogue!r}): another registered class has this name; rename yours")
        self._catalogues.add(catalogue)

    def of(self, event: EventEnum) -> Signal:
        """The signal of an event, created at the first request.

        Raises:
            TypeError, ValueError: for a filtered event, what is no event, or an event whose catalogue is not registered.
        """
        if not isinstance(event, EventEnum):
            resolve(event)
            raise TypeError(f"{event} has a filter, but only events without a filter have a signal; omit the filter")
        if type(event) not in self._catalogues:
            raise ValueError(
                f"{event} is not registered with this engine; call engine.register_events({type(event).__name__}) first"
            )
        signal = self.get(event.full_name)
        if not isinstance(signal, Signal):
            signal = self[event.full_name] = Signal(event)
            signal.around = self.around
        return signal

    def fire(self, engine: Kernel, event: EventEnum) -> None:
        """Emit an event of a user's own catalogue."""
        if type(event) is Events:
            raise ValueError(f"fire({event}): only the engine emits Events; to emit your own, subclass EventEnum")
        self.emit(engine, event)

    def emit(self, engine: Kernel, event: EventEnum) -> None:
        """Emit an event: count it, and call its receivers."""
        self.between_events()
        try:
            signal = self.of(event)
            signal.fired += 1
            if signal.is_connected:
                signal.emit(engine, signal.count(engine))
        finally:
            self.between_events()

    def listeners(self, event: EventEnum) -> Listeners:
        """Who is notified of a `Lifecycle` event."""
        return self._listeners.setdefault(event, Listeners(event))

    def notify(self, engine: Kernel, event: Lifecycle, *about: object) -> None:
        """Notify the engine's own services of a moment of its life; nothing that waits for the next event is disturbed."""
        for connection in tuple(self._listeners.get(event, ())):
            connection.receiver(engine, *about)

    def connect(
        self, engine: Kernel, event: AnyEvent, receiver: Receiver, phase: Phase, rank: int
    ) -> Callable[[], None]:
        """Connect a receiver to each event of an expression; returns a function that disconnects it. See `Engine.connect`."""
        pairs = [(self.of(one), chosen) for one, chosen in resolve(event)]
        where = f"connect({event})"
        check_receiver(receiver, where)
        phase = check_place(where, phase, rank)
        made = [(signal, Connection(receiver, phase, rank, chosen, None)) for signal, chosen in pairs]
        alike = [[other for other in signal.like(one) if other.owner is None] for signal, one in made]
        for (signal, connection), same in zip(made, alike, strict=True):
            if any(connection.same(other) for other in same):
                raise ValueError(f"{connection!r} is already connected to {signal.event} with this filter and phase")
        for (signal, connection), same in zip(made, alike, strict=True):
            self.notify(engine, Lifecycle.CONNECTED, signal, connection, same)
            signal.add(connection)
            connection.restart(engine)
        # Weakly: a handle that outlives the engine keeps nothing alive.
        references = [(weakref.ref(signal), weakref.ref(connection)) for signal, connection in made]

        def disconnect() -> None:
            for signal, connection in ((one(), other()) for one, other in references):
                if signal is not None and connection is not None:
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
        self.forget_repeats()

    def note_asker(self, engine: Kernel) -> None:
        """Note the receiver of an iteration's event that is asking for a stop, if one is being called."""
        for event in _BEFORE_UPDATES:
            if (called := self.of(event).executing()) is not None:
                signal, plan, place = called
                signal.repeat(engine.state.completed + 1)
                signal.askers = (signal.askers or set()) | {plan.connections[place]}

    def forget_repeats(self) -> None:
        """Let every count of an iteration be new."""
        for event in _BEFORE_UPDATES:
            self.of(event).forget_repeats()

    def rewind(self, engine: Kernel) -> None:
        """Recompute everything that depends on counts, in every signal."""
        for signal in self.all():
            signal.rewind(engine)

    def _counted(self) -> list[Signal]:
        """The signals whose counts are saved; not those of saving: a state cannot count its own save."""
        return [one for one in self.all() if one.event.counter == "fired" and one.event not in _SAVES]

    def state_dict(self) -> dict[str, Any]:
        """Number of emissions of each event that is counted by them, where it is not 0, and counts that come again."""
        counted = sorted(self._counted(), key=lambda one: str(one.event))
        repeating = [one for one in map(self.of, _BEFORE_UPDATES) if one.repeats is not None]
        repeats: dict[str, Any] = {str(one.event): one.repeats for one in repeating}
        askers = {f"{one.event}{_ASKED}": one.names_of_askers() for one in repeating if one.askers is not None}
        return {str(one.event): one.fired for one in counted if one.fired} | repeats | askers

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for event in [event for catalogue in self._catalogues for event in catalogue if str(event) in state]:
            self.of(event)  # a receiver that is connected later counts from the first emission
        for signal in self._counted():
            signal.fired = state.get(str(signal.event), 0)
        for event in _BEFORE_UPDATES:
            signal = self.of(event)
            signal.repeats = state.get(str(event))
            signal.find_askers(state.get(f"{event}{_ASKED}"))

    def signal(self, name: str, doc: str | None = None) -> blinker.NamedSignal:
        """The existing signal of this name; unlike blinker's, it creates none."""
        if name not in self:
            raise KeyError(f"no signal is named {name!r}; to get the signal of an event, call engine.signal(event)")
        return self[name]


class Decorator:
    """What `Engine.on` returns: connects the function that it decorates, and reports if there is none.

    Raises:
        TypeError, ValueError: for what is no event, phase or rank.
    """

    def __init__(self, engine: Kernel, event: AnyEvent, phase: Phase, rank: int) -> None:
        self._used = True  # unless what follows succeeds
        resolve(event)
        self._engine = weakref.ref(engine)
        self._arguments = event, check_place(f"on({event})", phase, rank), rank
        self._used = False

    def __call__(self, function: F) -> F:
        self._used = True
        engine = self._engine()
        if engine is not None:
            event, phase, rank = self._arguments
            engine.connect(event, function, phase=phase, rank=rank)
        return function

    def __del__(self) -> None:
        if not self._used and (engine := self._engine()) is not None:
            call = f"engine.on({self._arguments[0]})"
            problem = f"{call} was called without a function to decorate, so nothing is connected"
            way_out = f"write @{call} directly above a function, or call engine.connect(event, function)"
            engine.remark("W48", problem, way_out, key=str(self._arguments[0]))


_BEFORE_UPDATES = (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED)
"""The events of an iteration that may still not be made, so that its count comes again."""
_ASKED = ", asked by"
_SAVES = (Events.CHECKPOINT_STARTED, Events.CHECKPOINT_SAVING, Events.CHECKPOINT_SAVED)


def _nothing() -> None:
    pass
