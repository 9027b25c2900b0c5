"""The handlers attached to an engine: who they are, and when their subscriptions are connected."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .connection import Connection, next_place
from .events import EventEnum, Events, Lifecycle, check_receiver, resolve
from .handler import Handler, Service, begin_with, bind
from .part import Part
from .regions import note_problems
from .signals import Listeners, Signal
from .words import did_you_mean

if TYPE_CHECKING:
    from .kernel import Kernel

__all__ = ["Attachment", "Registry"]

H = TypeVar("H", bound=Handler)

_SETUP = (Events.MODEL_SETUP, Events.OPTIMIZER_SETUP)


@dataclass(slots=True)
class _Record:
    """What an engine knows of one attached handler.

    It is *on* while its subscriptions are connected, *leaving* once it was detached inside a run, and *waiting* otherwise:
    disabled, not on this rank, or about to join at the next boundary.
    """

    handler: Handler
    initial: dict[str, Any]  # its state as new, for `reset`
    place: int  # of its receivers among those of equal phase and rank; kept while it is not on
    connections: list[tuple[Signal | Listeners, Connection]] | None = None  # None unless it is on
    leaving: bool = False
    held: Mapping[str, Any] | None = None  # a state that was loaded while it was not on
    internal: bool = False  # whether it is a service of the engine itself

    @property
    def is_on(self) -> bool:
        return self.connections is not None


class Registry(Mapping[str, Handler], Part["Kernel"]):
    """The attached handlers by name, in the order in which they were attached.

    Outside a run everything takes effect at once. Inside one, a handler joins or leaves at the next iteration boundary without
    an open accumulation window, all of its subscriptions together: the boundary then calls `settle`.
    """

    def __init__(self, engine: Kernel) -> None:
        super().__init__(engine)
        self._records: dict[str, _Record] = {}
        self._pending: list[Handler] = []  # attached, detached or toggled since the last `settle`
        self._services: dict[str, _Record] = {}  # the engine's own, which are not listed

    def __getitem__(self, name: str) -> Handler:
        return self._find(name).handler

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def get(self, name: str, default: Any = None) -> Any:
        """The handler with this name, or ``default``."""
        record = self._records.get(name)
        return default if record is None else record.handler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"engine.handlers has no attribute {name!r}; find a handler by its name, engine[{name!r}], or by its class, "
            "engine[EMA]"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: {record.handler!r}' for name, record in self._records.items())}}}"

    # ---- what users ask for, through the engine -------------------------------------------------------------------

    def attach(self, handlers: Iterable[Handler], *, place: int | None = None) -> Attachment:
        """Attach all of these handlers, or none; see `Engine.attach`. ``place`` is that of a handler before (`place_of`)."""
        done: list[Handler] = []
        try:
            for handler in handlers:
                self._attach(handler, next_place() if place is None else place)
                done.append(handler)
        except BaseException:
            for handler in done:
                self.detach(handler)
            raise
        # Weakly: a handle that outlives the engine keeps nothing alive.
        of, references = weakref.ref(self.engine), [weakref.ref(handler) for handler in done]

        def detach() -> None:
            engine = of()
            for handler in (reference() for reference in references):
                if engine is not None and handler is not None and handler.engine is engine:
                    engine.handlers.detach(handler)

        return Attachment(detach)

    def _attach(self, handler: Handler, place: int) -> None:
        if not isinstance(handler, Handler):
            hint = (
                f"pass an instance: {handler.__name__}(...)"
                if isinstance(handler, type)
                else "pass the handlers as separate arguments, or in a single list that is not nested"
                if isinstance(handler, list | tuple | dict | set)
                else ("for a plain function, use engine.on(event) or engine.connect(event, function)")
            )
            raise TypeError(f"attach({handler!r}): expected a Handler; {hint}")
        if isinstance(handler, Service) and handler.name not in self._services:
            self.install(handler)  # one that was detached before
            return
        self._refuse_name(handler)
        if handler.engine is not None:
            raise ValueError(f"{handler!r} is attached to a different engine; detach it from that engine first")
        if handler.trains and not self.engine.training:
            raise ValueError(
                f"{handler!r} is for training, but this engine only evaluates, because its updates have no optimizer"
            )
        if self.engine.running:
            self._refuse_setup(handler)
        for subscription in handler.subscriptions:  # also of one that joins later
            where = f"{type(handler).__name__}.{subscription.method} at {subscription.event}"
            check_receiver(getattr(handler, subscription.method), where)
        self.engine.signals.notify(self.engine, Lifecycle.ATTACHED, handler)
        try:
            self._records[handler.name] = _Record(handler, begin_with(handler, self.engine), place)
            bind(handler, self.engine)
            self._settle_later(handler)
        except BaseException:
            self._forget(handler)
            raise

    def _refuse_name(self, handler: Handler) -> None:
        if (service := self._services.get(handler.name)) is not None:
            raise ValueError(
                f"{handler!r}: the name {handler.name!r} belongs to a service of the engine ({service.handler!r}); "
                f"rename the handler: {type(handler).__name__}(..., name='...')"
            )
        other = self.get(handler.name)
        if other is handler:
            raise ValueError(f"{handler!r} is already attached; detach it first: engine.detach({handler.name!r})")
        if other is not None:
            raise ValueError(
                f"{handler!r}: the name is taken by {other!r}; rename the handler: {type(handler).__name__}(..., "
                f"name='...'), or detach the other one first: engine.detach({other.name!r})"
            )

    def install(self, *services: Service) -> None:
        """Attach services of the engine itself: found and detached by their names, but neither listed, saved nor shown."""
        for service in services:
            self._services[service.name] = _Record(service, {}, next_place(), internal=True)
            bind(service, self.engine)
            self._pending.append(service)
        self.settle()

    def detach(self, handler: Handler | str) -> None:
        """Detach a handler, by itself or by name."""
        record = self._find(handler)
        self._refuse_essential(record.handler)
        if self.engine.running:
            self._refuse_setup(record.handler)
        record.leaving = True
        self._settle_later(record.handler)

    def toggle(self, handler: Handler) -> None:
        """Make what is connected agree with ``handler.enabled``."""
        self._refuse_essential(handler)
        if self.engine.running:
            self._refuse_setup(handler)
        self._settle_later(handler)

    def has(self, handler: Handler | str, event: EventEnum | None = None) -> bool:
        """Whether a handler, by itself or by name, is attached, and connected to this event if one is given."""
        record = self._records.get(handler if isinstance(handler, str) else handler.name)
        if record is None or (isinstance(handler, Handler) and record.handler is not handler):
            return False
        return event is None or any(signal.event is event for signal, _ in record.connections or ())

    def place_of(self, name: str) -> int:
        """The place of a handler's receivers among those of equal phase and rank, for what is attached in place of it."""
        return self._find(name).place

    def without(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Disable the handlers with these names inside the ``with`` block; see `Engine.without`."""
        return _Without(self.engine, names)

    def sync_written(self) -> None:
        """Let each handler sync the files that it has written, which a state refers to."""
        for handler in self.values():
            handler.sync_written()

    def writers(self) -> list[str]:
        """The names of the enabled handlers that write files or send something away."""
        return [name for name, handler in self.items() if handler.writes and handler.enabled]

    def of_class(self, kind: type[H]) -> H:
        """The one attached handler of a class; see `Engine.find`."""
        if not isinstance(kind, type):
            raise TypeError(f"find({kind!r}): expected a class of handlers; to find by name, use engine[{kind!r}]")
        found = [handler for handler in self.values() if isinstance(handler, kind)]
        if len(found) == 1:
            return found[0]
        there = ", ".join(f"{name} ({type(handler).__name__})" for name, handler in self.items()) or "none"
        if not found:
            raise KeyError(
                f"find({kind.__name__}): no such handler is attached; attached handlers: {there}{self._earlier(kind)}"
            )
        names = ", ".join(repr(handler.name) for handler in found)
        raise KeyError(f"find({kind.__name__}): {len(found)} handlers of this class are attached: {names}; "
                       "choose one by name: engine[name]")  # fmt: skip

    def _earlier(self, kind: type) -> str:
        """A hint at a handler whose class was defined again since, by a notebook's cell or a reloaded module."""
        for name, handler in self.items():
            if any(
                (one.__module__, one.__qualname__) == (kind.__module__, kind.__qualname__)
                for one in type(handler).__mro__
            ):
                return (
                    f"; {name!r} is an instance of an earlier definition of {kind.__name__}; attach an instance of "
                    f"the new class instead, or find the old handler by name: engine[{name!r}]"
                )
        return ""

    def _find(self, handler: Handler | str) -> _Record:
        name = handler.name if isinstance(handler, Handler) else handler
        record = self._record_of(name)
        if record is None or (isinstance(handler, Handler) and record.handler is not handler):
            hint = did_you_mean(str(name), self)
            raise KeyError(f"no handler {handler!r} is attached; attached handlers: {', '.join(self) or 'none'}{hint}")
        return record

    def _record_of(self, name: str) -> _Record | None:
        return self._records.get(name) or self._services.get(name)

    def _refuse_essential(self, handler: Handler) -> None:
        if isinstance(handler, Service) and handler.essential:
            services = [record.handler for record in self._services.values()]
            optional = ", ".join(repr(one.name) for one in services if isinstance(one, Service) and not one.essential)
            raise ValueError(
                f"{handler.name!r} is a service that every run depends on, so it cannot be disabled or detached; "
                f"the only services that you can disable or detach are {optional}"
            )

    def _refuse_setup(self, handler: Handler) -> None:
        for subscription in handler.subscriptions:
            if not isinstance(subscription.event, str) and any(
                event in _SETUP for event, _ in resolve(subscription.event)
            ):
                raise RuntimeError(
                    f"{handler!r} sets up the model or the optimizers before a run, so it cannot join or leave a run "
                    "that has started; attach, detach, enable or disable it between two runs"
                )

    # ---- joining and leaving --------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits for `settle`."""
        return not self._pending

    def _settle_later(self, handler: Handler) -> None:
        self._pending.append(handler)
        if self.engine.running:
            self.engine.boundary.wake()
        else:
            self.settle()

    def settle_rank_zero_only(self) -> None:
        """Connect and disconnect the handlers that take part on rank 0 only, after the rank has changed."""
        self._pending += [handler for handler in self.values() if handler.rank_zero_only]
        self.settle()

    def settle(self) -> None:
        """Connect and disconnect what was attached, detached or toggled; the first error leaves once all of it is done."""
        pending, self._pending = list(dict.fromkeys(self._pending)), []
        problems: list[BaseException] = []
        for handler in pending:
            record = self._record_of(handler.name)
            if record is None or record.handler is not handler:
                continue
            wanted = handler.enabled and not record.leaving and self.engine.group.takes_part(handler)
            try:
                if wanted and not record.is_on:
                    self._join(record)
                elif not wanted and record.is_on:
                    self._leave(record)
            except BaseException as problem:
                problems.append(problem)
                if wanted and self.engine.running:  # attached or enabled inside the run, and it cannot be
                    record.leaving = True
            if record.leaving:
                self._forget(handler)
        note_problems(problems, None)

    def _join(self, record: _Record) -> None:
        engine, handler = self.engine, record.handler
        try:
            handler.attached(engine)
            if engine.running:
                engine.signals.notify(engine, Lifecycle.JOINING, handler)
            connections = list(self._connections_of(record))
        except BaseException:
            self._release(handler)
            raise
        record.connections = connections
        added: dict[int, tuple[Signal | Listeners, list[Connection]]] = {}
        for signal, connection in connections:
            added.setdefault(id(signal), (signal, []))[1].append(connection)
        for signal, several in added.values():
            signal.add(*several)
            for connection in several:
                connection.restart(engine)
        if engine.running:
            self._start(record)

    def _start(self, record: _Record) -> None:
        """Let a handler that has joined a run begin as the others did; one that raises an error leaves again."""
        engine, handler = self.engine, record.handler
        try:
            self._emit_to(handler, Events.STARTED)
            self.give_held_states()
            if engine.state.epoch_open:
                self._emit_to(handler, Events.EPOCH_STARTED)
        except BaseException:
            self._disconnect(record)
            raise

    def _connections_of(self, record: _Record) -> Iterator[tuple[Signal | Listeners, Connection]]:
        handler, kind = record.handler, type(record.handler).__name__
        for subscription in handler.subscriptions:
            method = getattr(handler, subscription.method)
            event = subscription.event
            if isinstance(event, str):
                if not hasattr(handler, event):
                    raise AttributeError(
                        f"{kind}.{subscription.method} is declared with @on({event!r}), but the handler has no "
                        f"attribute {event!r}; set self.{event} in __init__ to an event, an interval or None"
                    )
                if (every := getattr(handler, event)) is None:
                    continue
                event = self.engine.event_of(every)
            for one, chosen in resolve(event):
                if type(one) not in (Events, Lifecycle):
                    self.engine.signals.register(type(one))
                bus = self.engine.signals
                place = bus.listeners(one) if record.internal and type(one) is Lifecycle else bus.of(one)
                yield place, Connection(
                    method, subscription.phase, subscription.rank, chosen, handler.name, subscription.reads,
                    subscription.writes, subscription.repeatable, record.place, record.internal,
                )  # fmt: skip

    def _leave(self, record: _Record) -> None:
        engine, handler = self.engine, record.handler
        try:
            if engine.running:
                self._emit_to(handler, Events.ENDED)
        finally:
            self._disconnect(record)

    def _disconnect(self, record: _Record) -> None:
        connections, record.connections = record.connections or [], None
        for signal, connection in connections:
            signal.remove(connection)
        self._release(record.handler)
        record.handler.detached(self.engine)

    def _emit_to(self, handler: Handler, event: EventEnum) -> None:
        signal = self.engine.signal(event)
        signal.emit(self.engine, signal.count(self.engine), owner=handler.name)

    def _release(self, handler: Handler) -> None:
        """Give back all that a handler has asked of the engine's parts."""
        engine = self.engine
        engine.boundary.withdraw(by=handler.name)
        engine.state.metrics.withdraw(handler.name)
        engine.overrides.release(handler)

    def _forget(self, handler: Handler) -> None:
        for records in (self._records, self._services):
            if (record := records.get(handler.name)) is not None and record.handler is handler:
                del records[handler.name]
        bind(handler, None)

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The states of all handlers by name; for one that is disabled since a state was loaded, that state."""
        return {
            name: self._records[name].held or self._records[name].handler.state_dict() for name in sorted(self._records)
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each handler its state; one that is disabled gets it once it takes part."""
        for name, record in self._records.items():
            if name not in states:
                continue
            if record.handler.enabled:
                record.handler.load_state_dict(states[name])
            else:
                record.held = states[name]

    def give_held_states(self) -> None:
        """Give the states that were loaded for handlers while they were disabled to those that take part now."""
        for record in list(self._records.values()):
            if record.is_on and record.held is not None:
                state, record.held = record.held, None
                record.handler.load_state_dict(state)

    def drop_held_states(self) -> None:
        """Forget states that were loaded for handlers that have not taken part since."""
        for record in self._records.values():
            record.held = None

    def reset(self) -> None:
        """Put every handler back to the state in which it was first attached."""
        self.drop_held_states()
        for record in self._records.values():
            record.handler.load_state_dict(copy.deepcopy(record.initial))


class _Without:
    """What `Engine.without` returns: disables handlers inside its ``with`` block, and reports if it was never entered."""

    def __init__(self, engine: Kernel, names: Iterable[str]) -> None:
        self._names = list(names)
        self._disabled: ExitStack | None = None
        self._engine = weakref.ref(engine)
        self._entered = True  # unless what follows succeeds
        self._handlers = [engine.handlers[name] for name in self._names]
        self._entered = not self._names

    def __enter__(self) -> None:
        self._entered = True
        if (engine := self._engine()) is not None and engine.running:
            raise RuntimeError(
                f"without({', '.join(map(repr, self._names))}) was called during a run, but a run enables and disables "
                "handlers only at iteration boundaries; set handler.enabled instead"
            )
        with ExitStack() as stack:
            for handler in [handler for handler in self._handlers if handler.enabled]:
                handler.enabled = False
                stack.callback(setattr, handler, "enabled", True)
            self._disabled = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        if self._disabled is not None:
            self._disabled.close()

    def __del__(self) -> None:
        if not self._entered and (engine := self._engine()) is not None:
            names = ", ".join(map(repr, self._names))
            problem = f"without({names}) was called without `with`, so it disabled nothing"
            engine.remark("W45", problem, f"write `with engine.without({names}):` around the run", *self._names)


class Attachment:
    """What `Engine.attach` and `Engine.connect` return: detaches by call, or at the end of a ``with`` block."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo: Callable[[], object] | None = undo

    def detach(self) -> None:
        """Detach what was attached; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
