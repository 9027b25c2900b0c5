"""Intervals and amounts of training: ``"10ep"``, ``"0.25ep"``, ``"500it"``, ``"2000st"``, ``"15min"``."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, overload

from ..core.events import AnyEvent, EventEnum, Events, EventUnion, FilteredEvent, resolve

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Interval", "check_every", "event_of", "saving_events", "unfiltered"]

_FORM = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]+)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_OTHER_NAMES = {
    **dict.fromkeys(("epoch", "epochs"), "ep"),
    **dict.fromkeys(("iter", "iters", "iteration", "iterations"), "it"),
    **dict.fromkeys(("step", "steps"), "st"),
}
_EXAMPLES = {"ep": "'1ep'", "it": "'1it'", "st": "'1step'"}
_COUNTED = {"ep": "whole epochs", "it": "iterations", "st": "optimizer steps"}


@dataclass(frozen=True, slots=True)
class Interval:
    """An amount of training, written as a number and a unit.

    The units are ``ep`` or ``epochs``, ``it`` or ``iterations``, ``st`` or ``steps`` (optimizer steps of the first update,
    without skipped ones), and ``s``, ``min``, ``h`` (wall-clock time). As ``every=``, it selects the events at which a handler
    runs: the completion of every n-th epoch or iteration, or the first completed iteration after n more steps or that much more
    time.

    A fraction of an epoch, such as ``"0.25ep"``, selects the first completed iteration that reaches the next multiple of it; a
    multiple that is a whole epoch is reached in the last iteration of that epoch. The epoch length must be known. Batches that a
    run leaves out, such as those around a spike, count as if they had been used.

    Example:
        >>> Interval.parse("500it")
        Interval(value=500, unit='it')
        >>> print(Interval.parse("1step"), Interval.parse("2 epochs"))
        1step 2ep
        >>> Interval.parse("2ep").event()
        Events.EPOCH_COMPLETED(every=2)
    """

    value: float
    unit: str

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise TypeError(f"Interval({self.value!r}, {self.unit!r}): expected a number")
        if self.unit not in (*_COUNTED, *_SECONDS):
            raise ValueError(
                f"{self.value:g}{self.unit}: the unit {self.unit!r} is not one of epochs, iterations, steps (or ep, it, st), "
                "s, min, h"
            )
        if self.value <= 0:
            raise ValueError(f"{self.value:g}{self.unit}: expected a number greater than 0")
        if self.unit in _COUNTED and not isinstance(self.value, int) and (self.unit != "ep" or self.value.is_integer()):
            raise ValueError(f"{self.value:g}{self.unit}: expected an int, without a decimal point")

    @classmethod
    def parse(cls, text: str | Interval) -> Interval:
        """Parse text such as ``"10ep"``; an Interval is returned unchanged.

        Raises:
            TypeError, ValueError: if it is not an interval.
        """
        if isinstance(text, Interval):
            return text
        if not isinstance(text, str):
            raise TypeError(
                f"{text!r} is not an interval; write a number with its unit, such as '10ep', '500it', '2000steps', "
                "'15min'"
            )
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not an interval; write a number and a unit, such as '10ep', '500it', '2000steps', '15min'"
            )
        number, unit = match.groups()
        unit = _OTHER_NAMES.get(unit, unit)
        return cls(float(number) if "." in number or unit in _SECONDS else int(number), unit)

    def time(self, where: str) -> float:
        """The wall-clock time in seconds. A unit that is no time raises a ValueError that begins with ``where``."""
        if self.unit not in _SECONDS:
            raise ValueError(f"{where}: {self} is not a wall-clock time; use seconds, minutes or hours, as in '15min'")
        return self.value * _SECONDS[self.unit]

    def event(self) -> AnyEvent:
        """The filtered event at which a handler with this interval runs."""
        if self.unit == "ep":
            if not isinstance(self.value, int):
                return Events.ITERATION_COMPLETED(when=_FractionOfEpoch(self.value))
            return Events.EPOCH_COMPLETED(every=self.value)
        if self.unit == "it":
            return Events.ITERATION_COMPLETED(every=int(self.value))
        if self.unit == "st":
            return Events.ITERATION_COMPLETED(when=_Steps(int(self.value)))
        return Events.ITERATION_COMPLETED(when=_Clock(self.time("every")))

    def __str__(self) -> str:
        unit = {"st": "step" if self.value == 1 else "steps"}.get(self.unit, self.unit)  # "1st" reads as "first"
        return f"{self.value:g}{unit}"


def event_of(every: str | Interval | AnyEvent) -> AnyEvent:
    """The event of an ``every=`` option, which is an interval or an event."""
    return every if isinstance(every, EventEnum | FilteredEvent | EventUnion) else Interval.parse(every).event()


def unfiltered(every: str | Interval | AnyEvent) -> AnyEvent:
    """The events of an ``every=`` option without their filters."""
    return EventUnion.of(*(event for event, _ in resolve(event_of(every))))


_OUTERMOST = frozenset({
    Events.MODEL_SETUP, Events.OPTIMIZER_SETUP, Events.STARTED, Events.CHECKPOINT_LOADED, Events.EPOCH_STARTED,
    Events.GET_BATCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED, Events.TERMINATED,
    Events.PREEMPTED, Events.INTERRUPTED, Events.EXCEPTION_RAISED, Events.ENDED, Events.DATA_EXHAUSTED,
})  # fmt: skip
"""The events that the loop emits between two iterations: none of them lies inside another event, or inside an iteration."""


def saving_events(every: str | Interval | AnyEvent) -> AnyEvent:
    """The events at which a state is saved that is due at those of an ``every=`` option, without filters.

    Inside another event, as EVALUATION_COMPLETED mostly is, or inside an iteration, a state would miss what is still to come. It
    is saved once the event around it, or the iteration, is complete.
    """
    plain = [event for event, _ in resolve(event_of(every))]
    outermost = [event for event in plain if event in _OUTERMOST]
    if len(outermost) == len(plain):
        return EventUnion.of(*plain)
    ends = Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED, Events.ENDED
    return EventUnion.of(*outermost, *ends)


@overload
def check_every(
    handler: object, every: str | Interval | AnyEvent, *, argument: str = ..., units: None = None
) -> Interval | AnyEvent: ...


@overload
def check_every(
    handler: object, every: str | Interval | AnyEvent, *, argument: str = ..., units: Sequence[str]
) -> Interval: ...


def check_every(
    handler: object,
    every: str | Interval | AnyEvent,
    *,
    argument: str = "every",
    units: Sequence[str] | None = None,
) -> Interval | AnyEvent:
    """Check an ``every=`` option of a handler.

    Args:
        handler: The handler, or its name, for the error.
        every: Value of the option: an interval or an event.
        argument: Name of the option.
        units: Accepted units, out of "ep", "it" and "st", in whole numbers; events are refused then. By default every interval
            and event is accepted.

    Raises:
        TypeError: if it is neither an interval nor an accepted event.
        ValueError: if it cannot be parsed, or has another unit.

    Example:
        >>> check_every("SWA", "100it", units=["ep"])
        Traceback (most recent call last):
        ValueError: SWA(every='100it'): expected a number of whole epochs, such as '1ep'
    """
    where = f"{handler if isinstance(handler, str) else type(handler).__name__}({argument}={every!r})"
    amounts, examples = (
        " or ".join(form(unit) for unit in units or ()) for form in (_COUNTED.__getitem__, _EXAMPLES.__getitem__)
    )
    wrong = f"{where}: expected a number of {amounts}, such as {examples}"
    if isinstance(every, EventEnum | FilteredEvent | EventUnion):
        if units is not None:
            raise TypeError(wrong)
        return every
    try:
        interval = Interval.parse(every)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    if units is not None and not (interval.unit in units and isinstance(interval.value, int)):
        raise ValueError(wrong)
    return interval


class _Steps:
    """True in the first iteration that reaches the next multiple of n optimizer steps."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.reached = 0

    def restart(self, engine: Engine) -> None:
        self.reached = engine.updates[0].steps // self.n

    def __call__(self, engine: Engine) -> bool:
        reached = engine.updates[0].steps // self.n
        if reached == self.reached:
            return False
        self.reached = reached
        return True

    def __repr__(self) -> str:
        return f"every {self.n} optimizer steps"


class _FractionOfEpoch:
    """True in the first iteration that reaches the next multiple of a fraction of an epoch."""

    def __init__(self, part: float) -> None:
        self.part = Fraction(str(part))  # exact: as floats, 3 * 0.1 != 0.3
        self.reached = 0  # how many multiples of the fraction
        self.epoch = 0
        self.due = 0  # the iteration that reaches the next multiple within this epoch

    def restart(self, engine: Engine) -> None:
        state = engine.state
        if state.epoch_length is None:
            if engine.running:
                raise ValueError(self._unknown(engine))
            return  # connected before the first run, which calls this again
        self._set(engine)

    def __call__(self, engine: Engine) -> bool:
        state = engine.state
        if state.epoch == self.epoch and state.iteration < self.due:
            return False
        # Multiples that an epoch which ended early did not reach are not made up for in the next epoch.
        before = self.reached if state.epoch == self.epoch else int((state.epoch - 1) // self.part)
        self._set(engine)
        return self.reached > before

    def _set(self, engine: Engine) -> None:
        """Store the position in the run, in epochs, and compute the iteration of the next multiple."""
        state, feed = engine.state, engine.feed
        assert state.epoch_length is not None
        length = feed.batches_read(state.epoch_length)
        share = Fraction(feed.batches_read(state.epoch_iteration), length) if state.epoch_open else Fraction(1)
        before = max(state.epoch - 1, 0)
        position = before + share if state.epoch else Fraction(0)
        self.epoch = state.epoch
        self.reached = int(position // self.part)
        wanted = ceil(((self.reached + 1) * self.part - before) * length)
        self.due = state.epoch_start + feed.iterations_until(wanted)

    def _unknown(self, engine: Engine) -> str:
        connections = [one for signal in engine.signals.all() for one in signal.connections]
        whose = next((repr(one) for one in connections if one.when is self), "an interval")
        return (
            f"{whose} ({self}): the epoch length is unknown, because the data has no length; pass epoch_length= to "
            "run(), or use an interval in iterations, such as '500it'"
        )

    def __repr__(self) -> str:
        return f"every {float(self.part):g} epochs"


class _Clock:
    """True in the first iteration that is completed after the next period of wall-clock time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.next = time.monotonic() + seconds

    def restart(self, engine: Engine) -> None:
        self.next = engine.group.now() + self.seconds

    def __call__(self, engine: Engine) -> bool:
        if not engine.group.has_come(self.next):
            return False
        self.next = engine.group.now() + self.seconds
        return True

    def __repr__(self) -> str:
        return f"every {self.seconds:g} s"


def seconds_of(max_time: str | Interval) -> float:
    """The seconds of `Engine.run`'s ``max_time``."""
    given = f"run(max_time={max_time!r})"
    expected = f"{given}: expected a wall-clock time with its unit, such as '90s', '15min', '2h', or None"
    if not isinstance(max_time, str | Interval):
        raise TypeError(expected)
    try:
        interval = Interval.parse(max_time)
    except ValueError:
        raise ValueError(expected) from None
    return interval.time(given)
