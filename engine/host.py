"""What handlers and functions are attached to: events, connections, toggles, claims."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .bus import Bus, Connection, Phase, Receiver, Signal
from .events import AnyEvent, EventEnum, Events, check_receiver, resolve
from .handler import Handler
from .interval import event_of
from .regions import note_problems
from .wiring import Wiring

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Attachment", "HandlerHost"]

F = TypeVar("F", bound=Receiver)

_SETUP = (Events.MODEL_SETUP, Events.OPTIMIZER_SETUP)


class HandlerHost:
    """The part of an engine that handlers meet: who is attached, under which name, and what is connected for them.

    Outside a run everything takes effect at once. Inside one, a handler joins or leaves at the next iteration boundary without
    an open window, all of its subscriptions together; the engine then calls `_settle`.

    Attributes:
        handlers: the attached handlers by name.
        signals: the blinker namespace of the engine's signals.
        running: whether a run is going on.
    """

    __slots__ = (
        "_boundary", "_catalogues", "_claims", "_connected", "_initial", "_leaving", "_pending", "handlers", "running",
        "signals",
    )  # fmt: skip

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.signals = Bus()
        self.running = False
        self._boundary = self.signals.of(Events.ITERATION_COMPLETED)
        self._catalogues: set[type[EventEnum]] = {Events}
        self._claims: dict[str, str] = {}
        self._connected: dict[str, list[tuple[Signal, Connection]]] = {}
        self._initial: dict[str, dict[str, Any]] = {}
        self._pending: list[Handler] = []  # toggled inside the run: looked at again at the next boundary
        self._leaving: set[str] = set()

    @property
    def _engine(self) -> Engine:
        """The engine that this is a part of."""
        return cast("Engine", self)

    def _give_held_states(self) -> None:
        """Called when a handler has joined a running engine: a state that was loaded for it is due."""

    def _released(self, handler: Handler, claims: list[str]) -> None:
        """Called when a handler takes no part any more, with what it had claimed."""

    # ---- events ---------------------------------------------------------------------------------------------------

    def signal(self, event: EventEnum) -> Signal:
        """The blinker signal of an event.

        Raises:
            TypeError, ValueError: for what is no event, or one whose catalogue was not registered.
        """
        if not isinstance(event, EventEnum):
            resolve(event)
            raise TypeError(f"{event} is filtered; an unfiltered event has a signal")
        if type(event) not in self._catalogues:
            raise ValueError(
                f"{event} is not known to this engine: engine.register_events({type(event).__name__}) first"
            )
        return self.signals.of(event)

    def register_events(self, *catalogues: type[EventEnum]) -> None:
        """Make events of your own known, so that receivers may be connected to them and `fire` may fire them."""
        for catalogue in catalogues:
            if not (isinstance(catalogue, type) and issubclass(catalogue, EventEnum)):
                raise TypeError(f"register_events({catalogue!r}): it has to be a subclass of EventEnum")
            if any(other.__name__ == catalogue.__name__ and other is not catalogue for other in self._catalogues):
                raise ValueError(f"register_events({catalogue!r}): there is another catalogue of this name; rename it")
            self._catalogues.add(catalogue)

    def fire(self, event: EventEnum) -> None:
        """Fire an event of your own: its receivers run now, in the order of phases."""
        if type(event) is Events:
            raise ValueError(f"fire({event}): the engine fires its own events; for one of yours subclass EventEnum")
        self._emit(event)

    def _emit(self, event: EventEnum) -> None:
        signal = self.signal(event)
        signal.fired += 1
        if signal.receivers:
            signal.emit(self._engine, signal.count(self._engine))

    def _rewind(self) -> None:
        for signal in self.signals.all():
            signal.rewind(self._engine)

    def connect(self, event: AnyEvent, receiver: Receiver, *, phase: Phase = Phase.CHANGE, rank: int = 0) -> Attachment:
        """Call ``receiver(engine)`` at an event; the handle takes it off again, also as a context manager."""
        pairs = [(self.signal(one), chosen) for one, chosen in resolve(event)]
        check_receiver(receiver, f"connect({event})")
        made = [(signal, Connection(receiver, Phase(phase), rank, chosen, None)) for signal, chosen in pairs]
        for signal, connection in made:
            if any(connection.same(other) for other in signal.connections):
                raise ValueError(f"{connection!r} is already connected to {signal.event} with this filter and phase")
        for signal, connection in made:
            self._connect(signal, connection)

        def disconnect() -> None:
            for signal, connection in made:
                signal.remove(connection)

        return Attachment(disconnect)

    def _connect(self, signal: Signal, connection: Connection) -> None:
        signal.add(connection)
        connection.restart(self._engine)

    def on(self, event: AnyEvent, *, phase: Phase = Phase.CHANGE, rank: int = 0) -> Callable[[F], F]:
        """Decorate a function to be called as ``function(engine)`` at an event.

        Example:
            >>> from signalfire import Engine, Events, Update
            >>> engine = Engine(Update.from_function(lambda engine, batch: None))
            >>> @engine.on(Events.ITERATION_COMPLETED(every=2))
            ... def show(engine):
            ...     print(engine.state.iteration)
            >>> _ = engine.run(max_iters=4)
            2
            4
        """

        def decorate(function: F) -> F:
            self.connect(event, function, phase=phase, rank=rank)
            return function

        return decorate

    # ---- handlers -------------------------------------------------------------------------------------------------

    def attach(self, *handlers: Handler) -> Attachment:
        """Attach handlers; in which order never matters for the ones that come with Signalfire.

        Returns:
            A handle: ``handle.detach()`` takes them off again, and it works as a context manager.

        Raises:
            TypeError, ValueError: for what is no handler, or a name that is taken; then none of them is attached.
        """
        done: list[Handler] = []
        try:
            for handler in handlers:
                self._attach(handler)
                done.append(handler)
        except BaseException:
            for handler in done:
                self.detach(handler)
            raise

        def detach() -> None:
            for handler in done:
                if handler.engine is self:
                    self.detach(handler)

        return Attachment(detach)

    def _attach(self, handler: Handler) -> None:
        if not isinstance(handler, Handler):
            hint = (
                f"give an instance: {handler.__name__}(...)"
                if isinstance(handler, type)
                else ("for a plain function use engine.on(event) or engine.connect(event, function)")
            )
            raise TypeError(f"attach({handler!r}): not a Handler; {hint}")
        other = self.handlers.get(handler.name)
        if other is handler:
            raise ValueError(f"{handler!r} is attached already")
        if other is not None:
            raise ValueError(
                f"{handler!r}: the name is taken by {other!r}; give it another: "
                f"{type(handler).__name__}(..., name='...')"
            )
        if handler.engine is not None:
            raise ValueError(f"{handler!r} is attached to another engine; detach it there, or build a second one")
        if handler.trains and not self._engine.training:
            raise ValueError(
                f"{handler!r} is for training, but this engine only evaluates: its updates have no optimizer"
            )
        if self.running:
            self._refuse_setup(handler)
        try:
            self._initial[handler.name] = copy.deepcopy(handler.state_dict())
            handler._engine = weakref.ref(self._engine)
            self.handlers[handler.name] = handler
            self._settle_later(handler)
        except BaseException:
            self._forget(handler)
            raise

    def detach(self, handler: Handler | str | Receiver) -> None:
        """Take off a handler, by itself or by name, or a function from all of its events.

        Raises:
            KeyError, ValueError: if there is no such handler or function.
        """
        if callable(handler) and not isinstance(handler, Handler):
            connected = [signal for signal in self.signals.all() if signal.has(handler)]
            if not connected:
                raise ValueError(f"detach({handler!r}): this function is not connected")
            for signal in connected:
                signal.disconnect(handler)
            return
        found = self._find(handler)
        if self.running:
            self._refuse_setup(found)
        self._leaving.add(found.name)
        self._settle_later(found)

    def has(self, handler: Handler | str | Receiver, event: EventEnum | None = None) -> bool:
        """Whether a handler, by itself or by name, or a function is attached (at this event, if one is given)."""
        if isinstance(handler, str):
            if handler not in self.handlers:
                return False
            handler = self.handlers[handler]
        if isinstance(handler, Handler):
            connected = self._connected.get(handler.name, [])
            attached = self.handlers.get(handler.name) is handler
            return attached and (event is None or any(signal.event is event for signal, _ in connected))
        return any(signal.has(handler) for signal in (self.signals.all() if event is None else [self.signal(event)]))

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Do without these handlers inside the ``with`` block, as if they had never been attached."""
        if self.running:
            raise RuntimeError(
                f"without({', '.join(map(repr, names))}): inside a run, what is switched off stays so until the next iteration "
                "boundary at least; set handler.enabled instead"
            )
        found = [self._find(name) for name in names]
        off = [handler for handler in found if handler.enabled]
        with ExitStack() as stack:
            for handler in off:
                handler.enabled = False
                stack.callback(setattr, handler, "enabled", True)
            yield

    def toggle(self, handler: Handler) -> None:
        """Make what is connected agree with ``handler.enabled``; setting that calls this."""
        if self.running:
            self._refuse_setup(handler)
        self._settle_later(handler)

    def claim(self, what: str, *, by: Handler) -> None:
        """Say that one handler alone may do this, until it is detached; for what would depend on an order if two did it.

        Raises:
            ValueError: if another handler claimed it, naming both.
        """
        other = self._claims.setdefault(what, by.name)
        if other != by.name:
            raise ValueError(f"both {other!r} and {by.name!r} would be in charge of {what}; detach one of the two")

    def claimed_by(self, handler: Handler | str) -> list[str]:
        """What a handler alone is in charge of; see `claim`, and `Engine.replace`, which claims the act."""
        name = self._find(handler).name
        return [what for what, owner in self._claims.items() if owner == name]

    def _find(self, handler: Handler | str) -> Handler:
        name = handler if isinstance(handler, str) else handler.name
        found = self.handlers.get(name)
        if found is None or (isinstance(handler, Handler) and found is not handler):
            raise KeyError(f"no handler {handler!r} is attached; there are: {', '.join(self.handlers) or 'none'}")
        return found

    def _refuse_setup(self, handler: Handler) -> None:
        for subscription in handler.subscriptions:
            if not isinstance(subscription.event, str) and any(
                event in _SETUP for event, _ in resolve(subscription.event)
            ):
                raise RuntimeError(
                    f"{handler!r} sets the model or the optimizers up before a run, and cannot join or leave a "
                    "running one; attach, detach or toggle it between two runs"
                )

    @property
    def _attention(self) -> bool:
        """Whether there is something to look at once this iteration is complete."""
        return self._boundary.awaited

    @_attention.setter
    def _attention(self, wanted: bool) -> None:
        if wanted is not self._boundary.awaited:
            self._boundary.wait(wanted)

    def _settle_later(self, handler: Handler) -> None:
        self._pending.append(handler)
        if self.running:
            self._attention = True
        else:
            self._settle()

    def _settle(self) -> None:
        """Connect and disconnect what was attached, detached or toggled; the first error leaves once all of it is done."""
        pending, self._pending = list(dict.fromkeys(self._pending)), []
        problems: list[BaseException] = []
        for handler in pending:
            name = handler.name
            if self.handlers.get(name) is not handler:
                continue
            wanted = handler.enabled and name not in self._leaving and self._has_a_part(handler)
            try:
                if wanted and name not in self._connected:
                    self._join(handler)
                elif not wanted and name in self._connected:
                    self._leave(handler)
            except BaseException as problem:
                problems.append(problem)
                if wanted and self.running:  # attached or switched on inside the run, and impossible: it is not there
                    self._leaving.add(name)
            if name in self._leaving:
                self._forget(handler)
        note_problems(problems, None)

    def _has_a_part(self, handler: Handler) -> bool:
        return not handler.rank_zero_only or self._engine.processes.first

    def _join(self, handler: Handler) -> None:
        connections: list[tuple[Signal, Connection]] = []
        try:
            handler.attached(self._engine)
            for subscription in handler.subscriptions:
                method = getattr(handler, subscription.method)
                event = subscription.event
                if isinstance(event, str):
                    if not hasattr(handler, event):
                        raise AttributeError(
                            f"{type(handler).__name__}.{subscription.method} is declared with @on({event!r}), but the handler "
                            "has no such attribute; it is to hold an event or an interval, or None"
                        )
                    if (every := getattr(handler, event)) is None:
                        continue
                    event = event_of(every)
                check_receiver(method, f"{type(handler).__name__}.{subscription.method} at {event}")
                for one, chosen in resolve(event):
                    connection = Connection(method, subscription.phase, subscription.rank, chosen, handler.name)
                    connections.append((self.signal(one), connection))
        except BaseException:
            self._release(handler)
            raise
        self._connected[handler.name] = connections
        for signal, connection in connections:
            self._connect(signal, connection)
        if self.running:
            self._tell(handler, Events.STARTED)
            self._give_held_states()
            if self._engine.state.epoch_open:
                self._tell(handler, Events.EPOCH_STARTED)

    def _leave(self, handler: Handler) -> None:
        try:
            if self.running:
                self._tell(handler, Events.ENDED)
        finally:
            for signal, connection in self._connected.pop(handler.name):
                signal.remove(connection)
            self._release(handler)
            handler.detached(self._engine)

    def _tell(self, handler: Handler, event: EventEnum) -> None:
        signal = self.signal(event)
        count = signal.count(self._engine)
        for connection in signal.connections:
            passes = connection.filter is None or connection.filter.next_due(count) == count
            if connection.owner == handler.name and passes:
                connection.call(self)

    def _forget(self, handler: Handler) -> None:
        self._leaving.discard(handler.name)
        self.handlers.pop(handler.name, None)
        self._initial.pop(handler.name, None)
        handler._engine = None

    def _release(self, handler: Handler) -> None:
        claims = [what for what, name in self._claims.items() if name == handler.name]
        for what in claims:
            del self._claims[what]
        self._released(handler, claims)

    # ---- seeing it ------------------------------------------------------------------------------------------------

    def wiring(self) -> Wiring:
        """Event, phase, handlers, in the order in which they run; ``print`` it or ``draw`` it."""
        return Wiring(self._engine)

    def __str__(self) -> str:
        return str(self.wiring())


class Attachment:
    """What `Engine.attach` and `Engine.connect` return: detaches by call, or at the end of a ``with`` block."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo: Callable[[], object] | None = undo

    def detach(self) -> None:
        """Take off what was attached; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
