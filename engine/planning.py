"""How many optimizer steps a run will make, for schedules that have to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine
    from .update import UpdateState

__all__ = ["steps_to_come"]


def steps_to_come(engine: Engine, update: UpdateState, *, planned: bool = False) -> int | None:
    """The optimizer steps that an update will make from here to the run's bounds; None if that cannot be known.

    In a trial run, ``planned`` asks for the steps of the run that it is a trial of.

    No step is assumed to be skipped. Each batch is assumed to be one micro-step; where it is not, as with time chunks, only
    ``max_steps`` bounds the first update's steps.
    """
    state = engine.state
    if not update.one_step_per_batch:
        known = update is engine.updates[0] and state.max_steps is not None
        return max(0, (state.max_steps or 0) - update.steps) if known else None
    length, last_epoch = state.epoch_length, state.max_epochs
    if planned and state.planned is not None:
        last_epoch, length = state.planned
    length_of = update.window.length_of or (lambda epoch: 1)
    most = None if state.max_steps is None else max(0, state.max_steps - engine.updates[0].steps)
    left = None if state.max_iters is None else max(0, state.max_iters - state.iteration)
    if length is None:
        if left is None or last_epoch is not None or update.window.length_of is not None:
            return most  # how many epochs, and so how many windows, these iterations make is not known
        return left if most is None else min(left, most)
    if last_epoch is None and left is None:
        return most
    steps, filled = 0, update.window.filled
    epoch, size = state.epoch + 1, length
    if state.epoch_open:
        epoch, size = state.epoch, length - state.epoch_iteration
    while (last_epoch is None or epoch <= last_epoch) and (left is None or left > 0):
        taken = size if left is None else min(size, left)
        window = length_of(epoch)
        steps += -(-(filled + taken) // window) if taken == size else (filled + taken) // window
        left = None if left is None else left - taken
        epoch, size, filled = epoch + 1, length, 0
    return steps if most is None else min(steps, most)
