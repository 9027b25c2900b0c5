"""How far a run will go: its optimizer steps, iterations and epochs, and whether an interval comes up in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.events import AnyEvent, EventEnum, resolve
from .interval import Interval

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["comes_up", "last_epoch", "last_iteration", "steps_to_come"]


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


def last_iteration(engine: Engine) -> int | None:
    """The largest iteration that the run can reach within its bounds; None if that is not known."""
    state = engine.state
    by_epochs = (
        None if state.max_epochs is None or state.epoch_length is None else state.max_epochs * state.epoch_length
    )
    first = engine.updates[0]
    by_steps = None
    if state.max_steps is not None and first.window.length_of is None and first.one_step_per_batch:
        by_steps = state.iteration + max(0, state.max_steps - first.steps)
    return min((end for end in (by_epochs, state.max_iters, by_steps) if end is not None), default=None)


def last_epoch(engine: Engine) -> int | None:
    """The last epoch that can be completed within the run's bounds; None if that is not known."""
    state, iterations = engine.state, last_iteration(engine)
    by_iterations = None if iterations is None or not state.epoch_length else iterations // state.epoch_length
    return min((end for end in (state.max_epochs, by_iterations) if end is not None), default=None)


def comes_up(engine: Engine, every: str | Interval | AnyEvent) -> bool | None:
    """Whether an interval or a filtered event comes up between here and the run's bounds; None if that is not known.

    Predicates (``when=``) and wall-clock times are not known; skipped steps and early stops are not expected.
    """
    if isinstance(every, str):
        every = Interval.parse(every)
    if isinstance(every, Interval):
        return _amount_comes_up(engine, every)
    known = [_event_comes_up(engine, event, chosen.next_due if chosen else None, chosen is not None and chosen.when is not None)
             for event, chosen in resolve(every)]  # fmt: skip
    return True if True in known else None if None in known else False


def _amount_comes_up(engine: Engine, every: Interval) -> bool | None:
    state, first = engine.state, engine.updates[0]
    done: float
    end: float | None
    if every.unit == "ep":
        done, end = state.epoch - state.epoch_open, last_epoch(engine)
        if (
            not isinstance(every.value, int)
            and state.epoch_length
            and (iterations := last_iteration(engine)) is not None
        ):
            done, end = state.iteration / state.epoch_length, iterations / state.epoch_length
    elif every.unit == "it":
        done, end = state.iteration, last_iteration(engine)
    elif every.unit == "st":
        to_come = steps_to_come(engine, first)
        done, end = first.steps, None if to_come is None else first.steps + to_come
    else:
        return None
    return None if end is None else end // every.value > done // every.value


def _event_comes_up(
    engine: Engine, event: EventEnum, next_due: Callable[[int], int] | None, has_predicate: bool
) -> bool | None:
    if next_due is None:
        return True
    ends = {
        "epoch": (engine.state.epoch, last_epoch(engine)),
        "iteration": (engine.state.iteration, last_iteration(engine)),
    }
    if has_predicate or not isinstance(event.counter, str) or event.counter not in ends:
        return None
    done, end = ends[event.counter]
    return None if end is None else next_due(done + 1) <= end
