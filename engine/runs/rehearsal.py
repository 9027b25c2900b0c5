"""Running an engine to find something out, and putting everything back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.connection import Connection, Phase
from ..core.events import Events
from ..core.handler import Handler
from ..core.setup import check_initialized
from ..core.state import State
from ..data.held_generators import HeldGenerators
from ..data.loading import epochs_of, generators_of, set_epochs
from ..resuming.changeable import own_parameters
from ..resuming.saving import copied, gather, put_back
from .interrupts import Interrupts

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["check_engine", "rehearsal"]

_BESIDE_THE_STEP = {
    "metrics", "files", "processes", "signals", "state", "random", "error", "stop", "bounds", "rates", "trainable", "modes",
}  # fmt: skip
"""What receivers may write, as they declare it, without an effect on the gradients or the step."""

_EVENTS = list(Events)  # in the order of the loop
_TO_THE_STEP = _EVENTS[_EVENTS.index(Events.STARTED) : _EVENTS.index(Events.UPDATE_RETRIED) + 1]
"""The events from the start of a run up to the step; not those of evaluations, checkpoints and the end."""

_FIRST = -(10**6)
"""A rank before all others."""


@contextmanager
def rehearsal(engine: Engine, data: Iterable[Any], *, where: str) -> Iterator[None]:
    """Let an engine run inside the ``with`` block, and put it and the data back as they were, also after an error.

    Inside, only what makes the step takes part: handlers that do not affect it, by what they declare to write, are disabled, and
    so are those that set the learning rate, and functions that are connected in Phase.RECORD or later. So nothing is logged,
    saved, validated or stopped.

    Of an engine that evaluates, all handlers take part but those that write files.

    Put back are weights, trained tensors in no module, buffers, attributes of the modules (see `changeable`), gradients,
    optimizers, the states of handlers, counters and metrics, random generators (also those of the data), modes, and the
    position in the data.

    Args:
        engine: The engine; it must not be running.
        data: The data of the runs inside.
        where: What an error begins with.

    Raises:
        TypeError: for data that can be iterated once only, which would be used up.
    """
    check_engine(engine, where)
    if engine.running:
        raise RuntimeError(f"{where} was called during a run; call it between runs")
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise TypeError(
            f"{where}: the data is a {type(data).__name__}; pass data that yields batches, such as a DataLoader or a "
            "list"
        )
    if isinstance(data, Iterator):
        raise TypeError(
            f"{where}: the data is a {type(data).__name__}, which this call would exhaust; pass data that can be "
            "iterated again, such as a DataLoader or a list"
        )
    check_initialized(engine, where)
    interrupts = Interrupts()
    interrupts.hold()
    try:
        before = _Before(engine, data)
        with ExitStack() as stack:
            stack.callback(before.put_back)
            off = _not_of_the_step(engine) if engine.training else engine.handlers.writers()
            stack.enter_context(engine.without(*off))
            stack.enter_context(_without_recording_functions(engine))
            stack.enter_context(engine.findings.rehearsing())
            if engine.training:
                stack.enter_context(engine.connect(Events.STARTED, before.note_own, phase=Phase.PREPARE, rank=_FIRST))
            try:
                interrupts.release()
                yield
            finally:
                interrupts.hold()
    finally:
        interrupts.release()


def check_engine(engine: object, where: str) -> None:
    """Raise an error for what is no engine, such as a model, or data in its place."""
    if not hasattr(engine, "updates"):
        raise TypeError(
            f"{where}: the first argument is a {type(engine).__name__}; expected an Engine, followed by the data"
        )


def _not_of_the_step(engine: Engine) -> list[str]:
    """The names of the enabled handlers without an effect on the gradients or the step, apart from the rate."""
    return [
        name for name, handler in engine.handlers.items() if handler.enabled and not _is_of_the_step(engine, handler)
    ]


def _is_of_the_step(engine: Engine, handler: Handler) -> bool:
    overrides = engine.overrides.owned_by(handler)
    if not all(getattr(one, "rehearsed", True) for one in overrides):
        return False
    return (
        any(getattr(one, "of_step", True) for one in overrides)
        or engine.has(handler, Events.MODEL_SETUP)
        or engine.has(handler, Events.OPTIMIZER_SETUP)
        or any(
            _changes_the_step(one)
            for event in _TO_THE_STEP
            for one in engine.signal(event).connections
            if one.owner == handler.name
        )
    )


def _changes_the_step(receiver: Connection) -> bool:
    return receiver.phase < Phase.RECORD and (receiver.writes is None or bool(receiver.writes - _BESIDE_THE_STEP))


@contextmanager
def _without_recording_functions(engine: Engine) -> Iterator[None]:
    """Disconnect functions of no handler from Phase.RECORD on, and connect them again in their places."""
    removed = [
        (place, connection)
        for place in engine.signals.all()
        for connection in place.connections
        if connection.owner is None and connection.phase >= Phase.RECORD
    ]
    for place, connection in removed:
        place.remove(connection)
    try:
        yield
    finally:
        for place, connection in removed:
            place.add(connection)


class _Before:
    """An engine and its data as they are now, to be put back."""

    def __init__(self, engine: Engine, data: Any) -> None:
        self.engine = engine
        self.saved = gather(engine)
        self.updates = [
            (update, update.optimizer, _groups(update.optimizer), update.last_skip, update.raw_loss)
            for update in engine.updates
        ]
        parameters: set[Tensor] = {p for root in engine.modules.values() for p in root.parameters()}
        parameters |= {p for update in engine.updates for p in update.parameters}
        # Also the tensors themselves: handlers may move or convert a model.
        self.parameters = [(p, p.data, p.requires_grad, p.grad, copied(p.grad)) for p in parameters]
        self.own: dict[Tensor, Tensor] = {}  # trained tensors in no module, with copies
        self.model = engine.model
        self.fields = [
            (part, dict(vars(part)))
            for part in (engine.feed, engine.snapshots, engine.boundary, engine.findings, engine.past)
        ]
        self.position = {name: getattr(engine.state, name) for name in State.__slots__}
        self.data = _positions(data)

    def note_own(self, engine: Engine) -> None:
        """Note the trained tensors in no module, which are known once the optimizers are built, before they are trained."""
        noted = {parameter for parameter, *_ in self.parameters}
        for parameter in own_parameters(engine).values():
            if parameter not in noted:
                self.own[parameter] = copied(parameter)
                self.parameters.append(
                    (parameter, parameter.data, parameter.requires_grad, parameter.grad, copied(parameter.grad))
                )

    def put_back(self) -> None:
        engine = self.engine
        for part, fields in self.fields:
            vars(part).clear()
            vars(part).update(fields)
        for parameter, values, *_ in self.parameters:
            parameter.data = values
        with torch.no_grad():
            for parameter, values in self.own.items():
                parameter.copy_(values)
        for update, optimizer, groups, last_skip, raw_loss in self.updates:
            if update.optimizer is not optimizer:
                update.take_optimizer(optimizer)
            if optimizer is not None:
                del optimizer.param_groups[len(groups) :]  # those that were added meanwhile
            update.last_skip, update.raw_loss = last_skip, raw_loss
        put_back(engine, self.saved, allowed=frozenset(), goes_back=True)
        # After the handlers, some of which set what an optimizer begins with.
        for _, optimizer, groups, *_ in self.updates:
            for group, options in zip(optimizer.param_groups if optimizer is not None else (), groups, strict=True):
                parameters = group["params"]
                group.clear()
                group.update(options, params=parameters)
        for name, value in self.position.items():
            setattr(engine.state, name, value)
        engine.model = self.model
        for parameter, _, trained, gradient, values in self.parameters:
            parameter.requires_grad_(trained)
            parameter.grad = None if gradient is None else gradient.copy_(values)
        self.data()
        engine.signals.rewind(engine)


def _groups(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """A copy of what an optimizer's groups say beside their parameters."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [{key: copied(value) for key, value in group.items() if key != "params"} for group in groups]


def _positions(data: Any) -> Callable[[], None]:
    """Read where data stands: its generators, those that it holds, its epoch, and its own state; returns what puts that back."""
    generators = [(one, one.get_state()) for one in generators_of(data)]
    held = HeldGenerators(data)
    states = held.states()
    epochs = epochs_of(data)
    own = data.state_dict() if hasattr(data, "state_dict") and hasattr(data, "load_state_dict") else None

    def put_back() -> None:
        for generator, state in generators:
            generator.set_state(state)
        held.put_back(states)
        set_epochs(data, epochs)
        if own is not None:
            data.load_state_dict(own)

    return put_back
