"""The events of a run, the filters on them, and how users define events of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["AnyEvent", "EventEnum", "EventUnion", "Events", "Filter", "FilteredEvent"]

NEVER = 2**30 - 1
"""A count that no run reaches. It is the largest that CPython compares as a single digit, which is its fast path."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which occurrences of an event a receiver wants; built by calling an event.

    Args:
        every: the occurrences whose count is a multiple of this number.
        once: this occurrence only, or the given set of them.
        after: only counts greater than this.
        before: only counts smaller than this.
        when: called as ``when(engine)`` at the receiver's turn; anything false keeps it from running. Asked last.
    """

    every: int | None = None
    once: frozenset[int] | None = None
    after: int | None = None
    before: int | None = None
    when: Callable[[Engine], object] | None = None

    @property
    def counts(self) -> bool:
        """Whether the filter looks at the event's count at all."""
        return not (self.every in (None, 1) and self.once is None and self.after is None and self.before is None)

    def next_due(self, count: int) -> int:
        """The smallest count from ``count`` on that passes the filter, or ``NEVER``."""
        due = count if self.after is None else max(count, self.after + 1)
        if self.once is not None:
            due = min((one for one in self.once if one >= due), default=NEVER)
        elif self.every is not None:
            due = -(-due // self.every) * self.every
        return NEVER if self.before is not None and due >= self.before else due

    def __str__(self) -> str:
        parts = [
            f"{name}={value}" for name in ("every", "after", "before") if (value := getattr(self, name)) is not None
        ]
        if self.once is not None:
            parts.append(f"once={min(self.once) if len(self.once) == 1 else sorted(self.once)}")
        if self.when is not None:
            parts.append(f"when={getattr(self.when, '__name__', None) or self.when}")
        return ", ".join(parts)


class EventEnum(Enum):
    """The base of every catalogue of events: subclass it for events of your own.

    A member is written as a label, or as ``(label, counter)``. The counter is what ``every``, ``once``, ``after`` and
    ``before`` are compared with: ``"iteration"``, ``"epoch"``, ``"fired"`` (how often the event was fired: the default),
    a function ``(engine) -> int`` of your own, or None for an event that only ``when`` can filter.

    Example:
        >>> class Translation(EventEnum):
        ...     SENTENCE_TRANSLATED = "sentence_translated"
        >>> Translation.SENTENCE_TRANSLATED(every=3)
        Translation.SENTENCE_TRANSLATED(every=3)
    """

    def __init__(self, label: str, counter: str | Callable[[Engine], int] | None = "fired") -> None:
        self.label = label
        self.counter = counter
        self.full_name = f"{type(self).__name__}.{self._name_}"  # under which the bus knows its signal
        if not callable(counter) and counter not in ("iteration", "epoch", "fired", None):
            raise ValueError(
                f"{type(self).__name__}: the counter of {label!r} is {counter!r}; it has to be "
                "'iteration', 'epoch', 'fired', a function of the engine, or None"
            )

    def __call__(
        self,
        *,
        every: int | None = None,
        once: int | Iterable[int] | None = None,
        after: int | None = None,
        before: int | None = None,
        when: Callable[[Engine], object] | None = None,
    ) -> FilteredEvent:
        """Narrow the event to some of its occurrences, counted from 1.

        Raises:
            TypeError, ValueError: for a filter that can never fire or contradicts itself, where it is written.
        """

        def refuse(kind: type[Exception], problem: str) -> NoReturn:
            raise kind(f"{self}: {problem}")

        if isinstance(once, int):
            once = [once]
        if once is not None and not isinstance(once, Iterable):
            refuse(TypeError, f"once={once!r} has to be an int, or several of them")
        once = None if once is None else list(once)
        numbers = {"every": every, "after": after, "before": before} | {
            f"once[{i}]": n for i, n in enumerate(once or ())
        }
        for argument, number in numbers.items():
            if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
                refuse(TypeError, f"{argument}={number!r} has to be an int")
            if number is not None and number < (0 if argument == "after" else 1):
                refuse(ValueError, f"{argument}={number} never fires: events are counted from 1")
        if when is not None:
            check_receiver(when, f"{self}: when")
        if once is not None and not once:
            refuse(ValueError, "once=[] never fires")
        if once is not None and every is not None:
            refuse(ValueError, f"every={every} and once={once} contradict each other; give one of them")
        chosen = Filter(every, None if once is None else frozenset(once), after, before, when)
        if chosen == Filter():
            refuse(TypeError, "give every, once, after, before or when; without a filter, write the event alone")
        if chosen.counts and self.counter is None:
            refuse(ValueError, f"it has no count, so that only when= can filter it, not {chosen}")
        if chosen.counts and chosen.next_due(1) == NEVER:
            refuse(ValueError, f"{chosen} never fires")
        return FilteredEvent(self, chosen)

    def __or__(self, other: AnyEvent) -> EventUnion:
        return EventUnion.of(self, other)

    def __repr__(self) -> str:
        return self.full_name

    __str__ = __repr__


@dataclass(frozen=True, slots=True)
class FilteredEvent:
    """An event and the filter on it: ``Events.ITERATION_COMPLETED(every=100)``."""

    event: EventEnum
    filter: Filter

    def __or__(self, other: AnyEvent) -> EventUnion:
        return EventUnion.of(self, other)

    def __repr__(self) -> str:
        return f"{self.event}({self.filter})"


@dataclass(frozen=True, slots=True)
class EventUnion:
    """Several events at once: ``Events.STARTED | Events.ITERATION_COMPLETED(every=100)``. Neither operand changes."""

    members: tuple[EventEnum | FilteredEvent, ...]

    @classmethod
    def of(cls, *events: AnyEvent) -> EventUnion:
        members: list[EventEnum | FilteredEvent] = []
        for event in events:
            found = resolve(event)
            members.extend(one if chosen is None else FilteredEvent(one, chosen) for one, chosen in found)
        return cls(tuple(dict.fromkeys(members)))

    def __or__(self, other: AnyEvent) -> EventUnion:
        return EventUnion.of(self, other)

    def __repr__(self) -> str:
        return " | ".join(map(str, self.members))


AnyEvent = EventEnum | FilteredEvent | EventUnion


def resolve(event: Any) -> list[tuple[EventEnum, Filter | None]]:
    """The plain events and their filters that a user's event expression stands for."""
    if isinstance(event, EventUnion):
        return [pair for member in event.members for pair in resolve(member)]
    if isinstance(event, FilteredEvent):
        return [(event.event, event.filter)]
    if isinstance(event, EventEnum):
        return [(event, None)]
    raise TypeError(
        f"{event!r} is not an event: give a member of Events or of an EventEnum of your own, "
        "such as Events.ITERATION_COMPLETED"
    )


def check_receiver(receiver: object, where: str) -> None:
    """Refuse what could not be called as ``receiver(engine)`` when the event comes."""
    if not callable(receiver):
        raise TypeError(f"{where}: {receiver!r} is not callable; a receiver is called as receiver(engine)")
    for function in (receiver, getattr(receiver, "__call__", None)):  # noqa: B004 (a coroutine may hide in __call__)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{where}: {receiver!r} is a coroutine function, which nobody would await; "
                "give a plain function, and start asynchronous work from it"
            )
        if inspect.isgeneratorfunction(function):
            raise TypeError(
                f"{where}: {receiver!r} is a generator function, whose body would never run; give a plain function"
            )
    try:
        signature = inspect.signature(receiver)
    except ValueError:  # a built-in that does not tell its signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"{where}: {receiver!r} takes {signature}, but a receiver is called as receiver(engine): "
            f"{error}; bind further arguments with functools.partial"
        ) from None


class Events(EventEnum):
    """Every event that a run emits, in the order of the loop below.

    ```
    MODEL_SETUP
    OPTIMIZER_SETUP
    STARTED
    CHECKPOINT_LOADED                           # only if a state was loaded; it is applied just before
    for each epoch:
        EPOCH_STARTED
        for each batch:
            GET_BATCH_STARTED
            GET_BATCH_COMPLETED
            ITERATION_STARTED
            for each update:
                UPDATE_STARTED
                FORWARD_STARTED
                FORWARD_COMPLETED               # not for an update that is a single function
                LOSS_COMPUTED                   # only if there is a loss
                BACKWARD_STARTED                # from here on only when training
                BACKWARD_COMPLETED
                if the window is complete:
                    GRADIENTS_READY
                    OPTIMIZER_STEP_STARTED
                    OPTIMIZER_STEP_COMPLETED
                UPDATE_COMPLETED
            ITERATION_COMPLETED
        EPOCH_COMPLETED
    COMPLETED
    ENDED                                       # always, also after an error
    ```

    Where unsized data ends, or a stop is asked for there, a last GET_BATCH_STARTED has no GET_BATCH_COMPLETED.
    An epoch that ``terminate`` or a bound cuts short has no EPOCH_COMPLETED; one ended by ``terminate_epoch`` has.
    Everything inside an iteration is counted by iterations, and what surrounds it by epochs, so that
    ``GRADIENTS_READY(every=10)`` means "in every tenth iteration". For optimizer steps use an interval: ``"10st"``.
    """

    MODEL_SETUP = "model_setup", None  # wrap, move or shard the model
    OPTIMIZER_SETUP = "optimizer_setup", None  # then optimizers that were given as factories are built
    STARTED = "started", None
    CHECKPOINT_LOADED = "checkpoint_loaded", None
    EPOCH_STARTED = "epoch_started", "epoch"
    GET_BATCH_STARTED = "get_batch_started", "iteration"  # counted as the iteration that the batch is for
    GET_BATCH_COMPLETED = "get_batch_completed", "iteration"  # state.batch may be transformed
    ITERATION_STARTED = "iteration_started", "iteration"  # state.plan may be changed
    UPDATE_STARTED = "update_started", "iteration"  # a region: what is entered here closes after UPDATE_COMPLETED
    FORWARD_STARTED = "forward_started", "iteration"  # a region: what is entered here closes after LOSS_COMPUTED
    FORWARD_COMPLETED = "forward_completed", "iteration"  # update.output may be transformed
    LOSS_COMPUTED = "loss_computed", "iteration"  # update.loss, update.backward_loss and update.weight may be changed
    BACKWARD_STARTED = "backward_started", "iteration"
    BACKWARD_COMPLETED = "backward_completed", "iteration"
    GRADIENTS_READY = "gradients_ready", "iteration"  # measure, clip; the step may still be skipped
    OPTIMIZER_STEP_STARTED = "optimizer_step_started", "iteration"
    OPTIMIZER_STEP_COMPLETED = "optimizer_step_completed", "iteration"  # also after a skipped one: update.skipped
    UPDATE_COMPLETED = "update_completed", "iteration"
    UPDATE_RETRIED = "update_retried", "fired"  # an attempt at the gradients failed and is made again
    ITERATION_COMPLETED = "iteration_completed", "iteration"
    EPOCH_COMPLETED = "epoch_completed", "epoch"
    COMPLETED = "completed", None
    TERMINATED = "terminated", None  # a stop took effect, just before COMPLETED
    PREEMPTED = "preempted", None  # what saves the run does it now: then it is stopped; see Engine.preempt
    INTERRUPTED = "interrupted", None  # KeyboardInterrupt
    EXCEPTION_RAISED = "exception_raised", None  # state.exception
    ENDED = "ended", None
    DATA_EXHAUSTED = "data_exhausted", "fired"  # the data ended inside an epoch of a given length, and starts again
    EVALUATION_STARTED = "evaluation_started", "fired"  # a region, on the engine that asked for the evaluation
    EVALUATION_COMPLETED = "evaluation_completed", "fired"  # state.metrics holds what was measured
    CHECKPOINT_SAVING = "checkpoint_saving", "fired"  # a region: weights are about to be read for an export
    CHECKPOINT_SAVED = "checkpoint_saved", "fired"  # a checkpoint is safely on the disk
    WEIGHTS_LOADED = "weights_loaded", "fired"  # other weights were put in place: `Engine.load_weights`
