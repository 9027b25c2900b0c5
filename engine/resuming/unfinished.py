"""Events that are not over yet: what a state that is taken inside one would miss, and what an error left of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from ..core.blame import warn
from ..core.connection import Connection, Phase, Plan, Receiver, do_nothing
from ..core.events import EventEnum, Events
from ..core.handler import Handler
from ..core.part import Part

if TYPE_CHECKING:
    from ..core.signals import Signal
    from ..core.update import UpdateState
    from ..core.window import Window
    from ..engine import Engine

__all__ = ["Unfinished"]

_OUTER = (Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED)
"""The events that a resumed run does not emit again for the position at which the state was taken."""


_Emission = tuple["Signal", Plan, int, bool]
"""A signal that was cut short, its plan, the place in it, and whether the receiver there had begun."""


class _Cut(NamedTuple):
    """An event that an error cut short, with what its remaining receivers read.

    Attributes:
        signal: the signal of the event.
        position: epoch, iteration, and whether the epoch was open.
        rest: the receivers that are still to be called, in order, each with its connection.
        batch: the batch of the iteration.
        updates: output, loss and reason of a skip of each update.
    """

    signal: Signal
    position: tuple[int, int, bool]
    rest: list[tuple[Connection, Receiver]]
    batch: Any
    updates: list[tuple[Any, Any, str | None]]


class Unfinished(Part["Engine"]):
    """Knows which receivers of an event are still to be called.

    A state that is taken before them is reported. After an error, the next run in the same process begins with those that the
    error kept from being called, as a run without the error would have continued. The receiver that was interrupted is called
    again if it declares that it can be (`on`). What cannot be made up for is reported.

    With several ranks nothing is made up for: each may have been interrupted elsewhere.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.reset()

    def reset(self) -> None:
        """Forget the event that was cut short."""
        self._cut: _Cut | None = None
        self._lost: list[tuple[Connection | None, str]] = []
        self._attached: frozenset[str] = frozenset()
        self._requests: tuple[dict[str, str], Any] = {}, None
        self._ended_at: tuple[int, int, bool] | None = None

    # ---- a state that is taken inside an event --------------------------------------------------------------------

    def report_missing(self) -> None:
        """Warn of a state that is taken now, if a run that resumes from it would lack what is still to come."""
        executing = (self.engine.signal(event).executing() for event in _OUTER)
        if self._is_current():
            self._report_lost()
        elif (outer := next((one for one in executing if one is not None), None)) is not None:
            self._report_uncalled(*outer)

    def _report_lost(self) -> None:
        """Warn of what an error has kept from being done."""
        rest = [] if self._cut is None else [one for one, _ in self._cut.rest if self._matters(one)]
        if lost := [*self._unrepeated(), *([f"{_listed(rest)} not called"] if rest else [])]:
            warn(
                "state_dict(): an error or Ctrl-C ended the run in the middle of an event or an iteration: "
                f"{'; '.join(lost)}. A run that resumes from this state does not recover what was lost; to save the "
                "last complete state instead, use Checkpoint(on_exception=True)"
            )

    def _report_uncalled(self, signal: Signal, plan: Plan, place: int) -> None:
        """Warn of the receivers that are still to be called at an event."""
        if plan.connections[place].phase is Phase.PERSIST:
            return
        others = (one for one in self.engine.signals.all() if one is not signal)
        inside = next((one.event for one in others if one.executing() is not None), None)
        wrote = inside is not None or any(map(_may_write_metrics, plan.connections[:place]))
        # What functions of the user do is not known.
        known = [one for one in plan.connections[place + 1 :] if one.owner is not None]
        rest = [one for one in known if self._matters(one, metrics=wrote)]
        if rest or inside is not None:
            where = signal.event if inside is None else f"{inside} inside {signal.event}"
            before = _named(rest or [plan.connections[place]])
            warn(
                f"state_dict() was called at {where}, before {before} finished. A run that resumes from this state "
                "lacks the rest of the work at this event. Call state_dict() in the last phase of the event: "
                f"@engine.on({signal.event}, phase=Phase.PERSIST)"
            )

    def _matters(self, connection: Connection, *, metrics: bool = True) -> bool:
        """Whether a run that never calls a receiver may differ.

        Args:
            connection: the receiver.
            metrics: whether a metric may have been written in this event; if not, those that only follow metrics do nothing.
        """
        if connection.phase is Phase.PERSIST:
            return False
        if connection.owner is None:
            return connection.phase is not Phase.RECORD and connection.is_foreign
        if not metrics and connection.reads is not None and "metrics" in connection.reads:
            return False
        if connection.writes is None or connection.writes - {"files"}:
            return True
        handler = self.engine.handlers.get(connection.owner)
        return handler is not None and type(handler).state_dict is not Handler.state_dict

    # ---- what an error leaves -------------------------------------------------------------------------------------

    def note(self, error: BaseException, *, in_updates: bool, made: int) -> None:
        """Note what an error that ends the run leaves undone, before windows are discarded whose gradients it may have spoilt.

        Args:
            error: the error.
            in_updates: whether it came while the updates of an iteration were made.
            made: how many updates of several had been made in that iteration.
        """
        engine, now = self.engine, self._position()
        # What an earlier error has left, if this one comes before it was made up for.
        cut = self._cut if self._cut is not None and self._cut.position == now else None
        lost, requests = (self._lost, self._requests) if self._ended_at == now else ([], ({}, None))
        self.reset()
        self._ended_at, self._cut, self._lost = now, cut, lost
        outer, inner = self._take_cuts(error)
        if not engine.training:
            return
        alone = not engine.processes.distributed
        if in_updates:
            self._lost += [(None, lost) for lost in self._lost_in_updates(made)]
        elif not alone:
            self._lost += [(None, _lost_window(one, one.window.filled)) for one in engine.updates if one.window.filled]
        if outer is not None:
            self._note_event(outer, inner, error, alone=alone)
        if alone and not in_updates:  # else what was asked for in the iteration is asked for again in it
            stops, restore = engine.boundary.requests
            self._attached = frozenset(engine.handlers)
            self._requests = {**requests[0], **stops}, requests[1] if restore is None else restore

    def _take_cuts(self, error: BaseException) -> tuple[_Emission | None, list[_Emission]]:
        """The event between iterations that an error has cut short, if there is one, and the other ones, which lie inside it."""
        cuts = [(one, one.take_cut(error)) for one in self.engine.signals.all() if one.cut is not None]
        found: dict[EventEnum, _Emission] = {signal.event: (signal, *cut) for signal, cut in cuts if cut is not None}
        outer = next((found[event] for event in _OUTER if event in found), None)
        return outer, [one for event, one in found.items() if event not in _OUTER]

    def _lost_in_updates(self, made: int) -> Iterator[str]:
        """What is lost of an iteration whose updates were under way, and which is repeated."""
        yield from self._lost_windows(made)
        if parts := _changed_by_forward(self.engine):
            iteration = self.engine.state.iteration
            again = f"iteration {iteration} is repeated, but the changes from its first forward pass are not undone"
            yield f"{again}: {', '.join(parts)}"

    def _lost_windows(self, made: int) -> Iterator[str]:
        engine = self.engine
        current, iteration = engine.state.update, engine.state.iteration
        others = [one for one in engine.updates if made and one is not current and one.omitted_in != iteration]
        for update in engine.updates:
            window = update.window
            if update is current:
                stepped = not update.can_skip or made > len(others)
                before = 0 if stepped else _micro_steps_before(window)
            else:
                stepped = update in others and not window.filled
                before = window.filled - (update in others and not stepped)
            if stepped:
                yield f"iteration {iteration} is repeated, although the step of update {update.name!r} had begun"
            if before:
                yield _lost_window(update, before)

    def _note_event(self, outer: _Emission, inner: list[_Emission], error: BaseException, *, alone: bool) -> None:
        """Note an event that was cut short at a receiver, with the events inside it."""
        signal, plan, place, begun = outer
        engine, state = self.engine, self.engine.state
        where = f"{signal.event} of epoch {state.epoch}, iteration {state.iteration}"
        is_whole = self._note_inner(inner, where)
        rest = _due_calls(plan, place + 1, engine)
        interrupted = plan.connections[place] if begun and place >= 0 else None
        if interrupted is not None and interrupted.repeatable and is_whole and alone:
            rest.insert(0, (interrupted, interrupted.receiver))
        elif interrupted is not None and not isinstance(error, Exception) and self._is_missed(interrupted):
            # An Exception says itself what has failed.
            cut = f"{interrupted!r} was cut short by {type(error).__name__} at {where}, and is not called again"
            self._lost.append((interrupted, cut))
        if not alone:
            self._lose([one for one, _ in rest if self._is_missed(one)], where)
            rest = []
        self._cut = _Cut(
            signal,
            self._position(),
            rest,
            state.batch,
            [(update.output, update.loss, update.skipped) for update in engine.updates],
        )

    def _note_inner(self, inner: list[_Emission], where: str) -> bool:
        """Note events that were cut short inside another one; returns whether its receiver can be called again as a whole."""
        # A part of the receiver's work that is over cannot be told from one that is not.
        again = [one for one in inner if one[0].event is not Events.EVALUATION_STARTED]
        for signal, plan, place, _ in again:
            uncalled = [one for one in plan.connections[place + 1 :] if one.phase is not Phase.PERSIST]
            self._lose(uncalled, f"{signal.event} inside {where}")
        return not again

    def _lose(self, uncalled: list[Connection], where: str) -> None:
        """Note receivers that are not called any more."""
        if uncalled:
            self._lost.append((None, f"{_listed(uncalled)} not called at {where}"))

    def _is_missed(self, connection: Connection) -> bool:
        """Whether a receiver that is not called any more has to be named: a run without it may differ, or lacks what it saves."""
        return connection.phase is Phase.PERSIST or self._matters(connection)

    # ---- making up for it -----------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the run completes an event that an error cut short in the run before."""
        return self._cut is not None and self._is_current()

    def begin_run(self) -> None:
        """Let a run continue after an error: ask again for what did not take effect, and warn of what cannot be made up for."""
        if not self._is_current():
            self.reset()
            return
        gone = self._attached - set(self.engine.handlers)
        stops, restore = self._requests
        self.engine.boundary.ask_again({by: reason for by, reason in stops.items() if by not in gone}, restore)
        lost = self._unrepeated()
        if self._cut is None:
            self.reset()
        self._lost, self._requests = [], ({}, None)
        if lost:
            warn(f"run(): the run continues after an error or Ctrl-C, but not exactly: {'; '.join(lost)}")

    def _unrepeated(self) -> list[str]:
        """What is lost; not of a receiver that was disconnected since."""
        connected = {one for signal in self.engine.signals.all() for one in signal.connections}
        return [lost for connection, lost in self._lost if connection is None or connection in connected]

    def complete(self, *events: EventEnum) -> None:
        """Call the receivers of an event that an error kept from being called, if it is one of these."""
        if (cut := self._cut) is None or cut.signal.event not in events:
            return
        self._ended_at = None
        engine, state = self.engine, self.engine.state
        state.batch = cut.batch
        for update, (output, loss, skipped) in zip(engine.updates, cut.updates, strict=True):
            update.output, update.raw_loss, update.skipped = output, loss, skipped
        connected = set(cut.signal.connections)
        engine.signals.between_events()
        try:
            cut.signal.emit_rest(engine, [(one, call) for one, call in cut.rest if one in connected])
        finally:
            engine.signals.between_events()
        self._cut = state.batch = None
        for update in engine.updates:
            update.output = update.skipped = None

    def _position(self) -> tuple[int, int, bool]:
        state = self.engine.state
        return state.epoch, state.completed, state.epoch_open

    def _is_current(self) -> bool:
        """Whether the run stands where an error has ended it."""
        return self._ended_at == self._position() and not self.engine.snapshots.has_loaded_state


def _changed_by_forward(engine: Engine) -> list[str]:
    """What a forward in training mode has drawn or changed that the next run does not put back; nothing if none has ended."""
    if all(update.output is None for update in engine.updates):
        return []
    modules = [one for _, one in engine.modules.parts() if one.training]
    draws = any(isinstance(one, _DropoutNd) and one.p > 0 for one in modules)
    changes = any(isinstance(one, _NormBase) and one.track_running_stats for one in modules)
    return [
        *(["random numbers for dropout"] if draws else []),
        *(["running statistics of normalization layers"] if changes else []),
    ]


def _may_write_metrics(connection: Connection) -> bool:
    return connection.owner is None or connection.writes is None or "metrics" in connection.writes


def _due_calls(plan: Plan, place: int, engine: Engine) -> list[tuple[Connection, Receiver]]:
    """What calls the receivers from a place on later, without those whose interval does not come up at this event."""
    due: list[tuple[Connection, Receiver]] = []
    for connection, call in zip(plan.connections[place:], plan[place:], strict=True):
        if call is connection.receiver:  # without a predicate, or with one that has passed
            due.append((connection, call))
        elif call is not do_nothing and not hasattr(connection.when, "restart"):
            due.append((connection, connection.call))
        elif call is not do_nothing and connection.when is not None and connection.when(engine):
            due.append((connection, connection.receiver))  # it counts from where the next run begins
    return due


def _micro_steps_before(window: Window) -> int:
    """How many micro-steps an open window had before the one that was interrupted."""
    return (window.filled or window.size) - 1 if window.length > 1 and window.held else 0


def _named(connections: Iterable[Connection]) -> str:
    return ", ".join(dict.fromkeys(map(repr, connections)))


def _listed(connections: Iterable[Connection]) -> str:
    names = _named(connections)
    return f"{names} {'were' if ', ' in names else 'was'}"


def _lost_window(update: UpdateState, micro_steps: int) -> str:
    steps = "batch" if micro_steps == 1 else f"{micro_steps} batches"
    return f"the gradients of the earlier {steps} in the accumulation window of update {update.name!r} are discarded"
