"""The signals of an iteration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .bus import Bus
from .events import Events
from .signals import Signal, SignalGroup

__all__ = ["IterationSignals"]


class IterationSignals(SignalGroup):
    """The signals of an iteration's events, up to the completion of its updates.

    Signals that these updates never emit are not in the group: they would stay due forever.
    """

    __slots__ = (
        "backward_completed", "backward_started", "batch_completed", "batch_started", "completed", "forward_completed",
        "forward_started", "gradients_ready", "iteration_started", "loss_computed", "started", "step_completed", "step_started",
    )  # fmt: skip

    def __init__(self, bus: Bus, updates: Iterable[Any], *, training: bool) -> None:
        self.batch_started = bus.of(Events.GET_BATCH_STARTED)
        self.batch_completed = bus.of(Events.GET_BATCH_COMPLETED)
        self.iteration_started = bus.of(Events.ITERATION_STARTED)
        self.started = bus.of(Events.UPDATE_STARTED)
        self.forward_started = bus.of(Events.FORWARD_STARTED)
        self.forward_completed = bus.of(Events.FORWARD_COMPLETED)
        self.loss_computed = bus.of(Events.LOSS_COMPUTED)
        self.backward_started = bus.of(Events.BACKWARD_STARTED)
        self.backward_completed = bus.of(Events.BACKWARD_COMPLETED)
        self.gradients_ready = bus.of(Events.GRADIENTS_READY)
        self.step_started = bus.of(Events.OPTIMIZER_STEP_STARTED)
        self.step_completed = bus.of(Events.OPTIMIZER_STEP_COMPLETED)
        self.completed = bus.of(Events.UPDATE_COMPLETED)
        never: list[Signal] = []
        if not training:
            never += [self.backward_started, self.backward_completed]
            never += [self.gradients_ready, self.step_started, self.step_completed]
        if all(update.forward is None for update in updates):
            never.append(self.forward_completed)
        if all(update.loss is None and update.function is None for update in updates):
            never.append(self.loss_computed)
        signals = [getattr(self, name) for name in self.__slots__]
        super().__init__(*(signal for signal in signals if signal not in never))
