"""How long a run will be: its optimizer steps, iterations and epochs, and whether an interval occurs in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.events import AnyEvent, EventEnum, resolve
from .interval import Interval

if TYPE_CHECKING:
    from ..core.state import State
    from ..core.update import UpdateState
    from ..core.window import Window
    from ..engine import Engine

__all__ = ["comes_up", "last_epoch", "last_iteration", "steps_to_come"]


def steps_to_come(engine: Engine, update: UpdateState, *, planned: bool = False) -> int | None:
    """The number of optimizer steps that an update will take from here to the run's limits; None if this cannot be known.

    In a trial run, ``planned`` selects the steps of the full run that the trial stands for.

    This assumes that no step is skipped and each batch is one micro-step; if it is not, as with time chunks, only ``max_steps``
    limits the first update's steps.
    """
    state, window = engine.state, update.window
    most = _left(state.max_steps, engine.updates[0].steps)
    if not update.one_step_per_batch:
        return most if update is engine.updates[0] else None
    length, last_epoch = state.epoch_length, state.max_epochs
    if planned and state.planned is not None:
        last_epoch, length = state.planned
    left = _left(state.max_iters, state.iteration)
    if last_epoch is None and left is None:
        return most
    if length is None:  # then how many epochs, and so how many windows, these iterations make is not known
        return _least(most, left) if last_epoch is None and window.length_of is None else most
    return _least(most, _steps_until(state, window, length, last_epoch, left))


def _steps_until(state: State, window: Window, length: int, last_epoch: int | None, left: int | None) -> int:
    """The steps until an epoch has ended, or so many more iterations are made: an epoch ends with a step."""
    steps, filled = 0, window.filled
    epoch, size = (state.epoch, length - state.epoch_iteration) if state.epoch_open else (state.epoch + 1, length)
    while (last_epoch is None or epoch <= last_epoch) and (left is None or left > 0):
        taken = size if left is None else min(size, left)
        each = 1 if window.length_of is None else window.length_of(epoch)
        steps += -(-(filled + taken) // each) if taken == size else (filled + taken) // each
        left = _left(left, taken)
        epoch, size, filled = epoch + 1, length, 0
    return steps


def _left(bound: int | None, done: int) -> int | None:
    """What is left until a bound; None without one."""
    return None if bound is None else max(0, bound - done)


def _least(*ends: int | None) -> int | None:
    """The least of those that are known; None without one."""
    return min((end for end in ends if end is not None), default=None)


def last_iteration(engine: Engine) -> int | None:
    """The last iteration that the run can reach within its limits; None if this is not known."""
    state, first = engine.state, engine.updates[0]
    epochs, length = state.max_epochs, state.epoch_length
    by_epochs = None if epochs is None or length is None else epochs * length
    by_steps = None
    if state.max_steps is not None and first.window.length_of is None and first.one_step_per_batch:
        by_steps = state.iteration + max(0, state.max_steps - first.steps)
    return _least(by_epochs, state.max_iters, by_steps)


def last_epoch(engine: Engine) -> int | None:
    """The last epoch that the run can complete within its limits; None if this is not known."""
    state, iterations = engine.state, last_iteration(engine)
    by_iterations = None if iterations is None or not state.epoch_length else iterations // state.epoch_length
    return _least(state.max_epochs, by_iterations)


def comes_up(engine: Engine, every: str | Interval | AnyEvent) -> bool | None:
    """Whether an interval or a filtered event occurs between here and the run's limits; None if this is not known.

    Predicates (``when=``) and wall-clock times are not known; skipped steps and early stops are not taken into account.
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
