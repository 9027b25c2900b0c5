"""The events of a run, filters on them, and the base class of custom events."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, EnumMeta
from numbers import Integral
from typing import Any, Never

from .words import did_you_mean

__all__ = ["AnyEvent", "EventEnum", "EventUnion", "Events", "Filter", "FilteredEvent", "Lifecycle", "check_receiver"]

NEVER = 2**30 - 1
"""A count that no run reaches: the largest that CPython compares as a single digit, its fast path."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects the occurrences of an event that call a receiver; built by calling an event.

    Args:
        every: Selects counts that are multiples of this number.
        once: Selects only this count, or these counts.
        after: Selects counts greater than this.
        before: Selects counts smaller than this.
        when: Predicate called as ``when(engine)`` just before the receiver, and only if all other filters pass.
    """

    every: int | None = None
    once: frozenset[int] | None = None
    after: int | None = None
    before: int | None = None
    when: Callable[[Any], object] | None = None

    @property
    def counts(self) -> bool:
        """Whether the filter depends on the event's count."""
        return not (self.every in (None, 1) and self.once is None and self.after is None and self.before is None)

    def next_due(self, count: int) -> int:
        """The smallest count >= ``count`` that passes the filter, or ``NEVER``."""
        due = count if self.after is None else max(count, self.after + 1)
        if self.once is not None:
            due = min([one for one in self.once if one >= due], default=NEVER)
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


_LAST = {"BEGIN": "STARTED", "START": "STARTED", "END": "COMPLETED", "FINISHED": "COMPLETED"}  # words of other engines
_FIRST = {"BATCH": "ITERATION", "STEP": "ITERATION", "EVAL": "EVALUATION", "EVALUATE": "EVALUATION", "TEST": "EVALUATION",
          "VAL": "EVALUATION", "VALIDATE": "EVALUATION", "VALIDATION": "EVALUATION"}  # fmt: skip


class _Catalogue(EnumMeta):
    def __getattr__(cls, name: str) -> Any:
        members = vars(cls).get("_member_map_", {})
        if name in members:
            return members[name]
        if name.startswith("_"):
            raise AttributeError(name)
        *words, last = name.upper().removeprefix("ON_").removeprefix("TRAIN_").removeprefix("FIT_").split("_")
        first, *rest = [*words, _LAST.get(last, last)]
        meant = "_".join([_FIRST.get(first, first), *rest])
        known = any(member.startswith(meant) for member in members)
        hint = did_you_mean(meant if known else name.upper(), members)
        raise AttributeError(f"{cls.__name__} has no event {name!r}{hint}")


class EventEnum(Enum, metaclass=_Catalogue):
    """Base class of all event enums: subclass it for custom events.

    A member is a label, or ``(label, counter)``. ``every``, ``once``, ``after`` and ``before`` are compared with the counter:
    ``"iteration"``, ``"epoch"``, ``"fired"`` (the number of emissions of the event; the default), a function ``(engine) -> int``,
    or None for an event that only ``when`` can filter.

    Example:
        >>> class Translation(EventEnum):
        ...     SENTENCE_TRANSLATED = "sentence_translated"
        >>> Translation.SENTENCE_TRANSLATED(every=3)
        Translation.SENTENCE_TRANSLATED(every=3)
    """

    def __init__(self, label: str, counter: str | Callable[[Any], int] | None = "fired") -> None:
        self.label = label
        self.counter = counter
        self.full_name = f"{type(self).__name__}.{self._name_}"  # the key of its signal in the bus
        if not callable(counter) and counter not in ("iteration", "epoch", "fired", None):
            raise ValueError(
                f"{type(self).__name__}: {label!r} has the counter {counter!r}; expected "
                "'iteration', 'epoch', 'fired', a function that takes the engine, or None"
            )

    def __call__(
        self,
        *unnamed: Never,
        every: int | None = None,
        once: int | Iterable[int] | None = None,
        after: int | None = None,
        before: int | None = None,
        when: Callable[[Any], object] | None = None,
        **unknown: Never,
    ) -> FilteredEvent:
        """The event with a filter, which selects occurrences, counted from 1. For the arguments see `Filter`.

        Raises:
            TypeError, ValueError: for a filter that can never fire or contradicts itself.
        """

        if unnamed or unknown:
            raise TypeError(f"{self}: {_no_filters(unnamed, unknown)}")
        numbers = {"every": every, "after": after, "before": before}
        every, after, before = (_whole(self, name, number) for name, number in numbers.items())
        if when is not None:
            check_receiver(when, f"{self}: when", returns=True)
        chosen = Filter(every, _several(self, once), after, before, when)
        self._check(chosen)
        return FilteredEvent(self, chosen)

    def _check(self, chosen: Filter) -> None:
        """Raise an error for a filter that selects nothing, or everything."""
        if chosen.once is not None and chosen.every is not None:
            raise ValueError(
                f"{self}: every={chosen.every} and once={sorted(chosen.once)} contradict each other; pass only one"
            )
        if chosen == Filter():
            raise TypeError(
                f"{self}: expected every=, once=, after=, before= or when=; without a filter, omit the parentheses"
            )
        if chosen.counts and self.counter is None:
            raise ValueError(f"{self}: the event has no counter; filter it with when= instead of {chosen}")
        if chosen.counts and chosen.next_due(1) == NEVER:
            raise ValueError(f"{self}: {chosen} never fires")

    def __or__(self, other: AnyEvent) -> EventUnion:
        return EventUnion.of(self, other)

    def __repr__(self) -> str:
        return self.full_name

    __str__ = __repr__


def _whole(event: EventEnum, argument: str, number: Any) -> int | None:
    """A count of a filter as an int."""
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"{event}: {argument}={number!r}: expected an int")
    if number < (0 if argument == "after" else 1):
        raise ValueError(f"{event}: {argument}={number} never fires, because events are counted from 1")
    return int(number)


def _several(event: EventEnum, once: Any) -> frozenset[int] | None:
    """The counts of ``once=``."""
    if once is None:
        return None
    once = [once] if isinstance(once, Integral) else once
    if not isinstance(once, Iterable):
        raise TypeError(f"{event}: once={once!r}: expected an int or several ints")
    counts = frozenset(n for i, one in enumerate(once) if (n := _whole(event, f"once[{i}]", one)) is not None)
    if not counts:
        raise ValueError(f"{event}: once=[] never fires")
    return counts


def _no_filters(unnamed: tuple[Any, ...], unknown: dict[str, Any]) -> str:
    """What is wrong with arguments that are no filters."""
    given = ", ".join([*map(repr, unnamed), *(f"{name}={value!r}" for name, value in unknown.items())])
    hint = did_you_mean(next(iter(unknown), "").replace("event_filter", "when"), _FILTERS)
    return f"{given} is not a filter; available filters: {', '.join(f'{name}=' for name in _FILTERS)}{hint}"


@dataclass(frozen=True, slots=True)
class FilteredEvent:
    """An event with a filter: ``Events.ITERATION_COMPLETED(every=100)``."""

    event: EventEnum
    filter: Filter

    def __or__(self, other: AnyEvent) -> EventUnion:
        return EventUnion.of(self, other)

    def __repr__(self) -> str:
        return f"{self.event}({self.filter})"


@dataclass(frozen=True, slots=True)
class EventUnion:
    """Several events: ``Events.STARTED | Events.ITERATION_COMPLETED(every=100)``. The operands are not changed."""

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


_FILTERS = ("every", "once", "after", "before", "when")


def resolve(event: Any) -> list[tuple[EventEnum, Filter | None]]:
    """Split an event expression into plain events, each with its filter or None."""
    if isinstance(event, EventUnion):
        return [pair for member in event.members for pair in resolve(member)]
    if isinstance(event, FilteredEvent):
        return [(event.event, event.filter)]
    if isinstance(event, EventEnum):
        return [(event, None)]
    if inspect.isroutine(event):
        raise TypeError(
            f"{event!r} is a function, not an event; pass an event to the decorator: @engine.on(Events.EPOCH_STARTED)"
        )
    raise TypeError(
        f"{event!r} is not an event; pass a member of Events, such as Events.EPOCH_STARTED, or of your own EventEnum"
    )


def check_receiver(receiver: object, where: str, *, returns: bool = False) -> None:
    """Raise TypeError for a receiver that cannot be called as ``receiver(engine)``, or does nothing, unless it ``returns``."""
    if isinstance(receiver, type) and not returns:
        raise TypeError(f"{where}: {receiver!r} is a class; pass a function, or a method of an instance")
    if not callable(receiver):
        attach = "; attach a handler with engine.attach(handler)" if hasattr(receiver, "subscriptions") else ""
        raise TypeError(f"{where}: {receiver!r} is not callable; pass a function that takes the engine{attach}")
    for function in (receiver, getattr(receiver, "__call__", None)):  # noqa: B004 (a coroutine may hide in __call__)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{where}: {receiver!r} is a coroutine function, which would never be awaited; pass a plain function"
            )
        if inspect.isgeneratorfunction(function):
            raise TypeError(
                f"{where}: {receiver!r} is a generator function, whose body would never run; pass a plain function"
            )
    try:
        signature = inspect.signature(receiver, follow_wrapped=False)
    except ValueError:
        if inspect.ismethod(receiver):
            raise TypeError(
                f"{where}: {receiver!r} has no parameter self; declare it as {receiver.__name__}(self, engine)"
            ) from None
        return  # a built-in without a signature
    if inspect.isfunction(receiver) and next(iter(signature.parameters), "") == "self":
        raise TypeError(
            f"{where}: {receiver!r} takes self but is not bound to an object, so the engine would be passed as self; "
            "connect the method of an instance, or decorate the method with @on(...) in a Handler"
        )
    try:
        signature.bind(None)
    except TypeError as error:
        name, own = getattr(receiver, "__name__", repr(receiver)), "self, " * inspect.ismethod(receiver)
        raise TypeError(
            f"{where}: {name}{signature} cannot be called with only the engine: {error}; define {name}({own}engine), and "
            "bind other arguments with functools.partial"
        ) from None


class Events(EventEnum):
    """The events of a run, in the order of the loop below.

    ```
    MODEL_SETUP
    OPTIMIZER_SETUP
    STARTED
    CHECKPOINT_LOADED                           # only if a state was loaded, after it was applied
    for each epoch:
        EPOCH_STARTED
        for each batch:
            GET_BATCH_STARTED
            GET_BATCH_COMPLETED
            ITERATION_STARTED
            for each update:
                UPDATE_STARTED
                FORWARD_STARTED
                FORWARD_COMPLETED               # not for an update made by Update.from_function
                LOSS_COMPUTED                   # only if there is a loss
                BACKWARD_STARTED                # from here to OPTIMIZER_STEP_COMPLETED only in training
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

    Other events are emitted when the thing they are named after happens: EVALUATION_STARTED, EVALUATION_COMPLETED,
    CHECKPOINT_STARTED, CHECKPOINT_SAVED, WEIGHTS_LOADED, DATA_EXHAUSTED, UPDATE_RETRIED, IMAGE_LOGGED and similar ones.
    TERMINATED, PREEMPTED, INTERRUPTED or EXCEPTION_RAISED tell how a run ends.

    GET_BATCH_STARTED is not followed by GET_BATCH_COMPLETED when unsized data ends, or when the run is stopped at it. An epoch
    that is cut short by ``terminate`` or a bound has no EPOCH_COMPLETED; one ended by ``terminate_epoch`` has.

    Events inside an iteration are counted by iterations, and EPOCH_STARTED and EPOCH_COMPLETED by epochs:
    ``GRADIENTS_READY(every=10)`` means every tenth iteration. For every tenth optimizer step use the interval ``"10st"``.

    An iteration that ``terminate`` or ``terminate_epoch`` cuts before its updates does not run, and its number is reused.
    Receivers with a filter on counts are called once for this number; receivers without one are called again.
    """

    MODEL_SETUP = "model_setup", None
    """Before the optimizers are built: wrap, move or shard the model."""
    OPTIMIZER_SETUP = "optimizer_setup", None
    """The model is set up; afterwards, optimizers given as factories are built."""
    STARTED = "started", None
    """The run begins, with its optimizers; afterwards, a loaded state is put in place."""
    CHECKPOINT_LOADED = "checkpoint_loaded", None
    """A loaded state was put in place."""
    EPOCH_STARTED = "epoch_started", "epoch"
    """A new epoch begins; not for one that a resumed run continues."""
    GET_BATCH_STARTED = "get_batch_started", "iteration"
    """A batch is about to be read; counted as the iteration of that batch."""
    GET_BATCH_COMPLETED = "get_batch_completed", "iteration"
    """``state.batch`` was read, and may be transformed."""
    ITERATION_STARTED = "iteration_started", "iteration"
    """Before the updates; ``state.plan`` may be changed."""
    UPDATE_STARTED = "update_started", "iteration"
    """A region: contexts entered here are left after UPDATE_COMPLETED."""
    FORWARD_STARTED = "forward_started", "iteration"
    """A region: contexts entered here are left after LOSS_COMPUTED."""
    FORWARD_COMPLETED = "forward_completed", "iteration"
    """``update.output`` is there, and may be transformed."""
    LOSS_COMPUTED = "loss_computed", "iteration"
    """``update.loss`` is there; ``update.loss``, ``update.backward_loss`` and ``update.weight`` may be changed."""
    BACKWARD_STARTED = "backward_started", "iteration"
    """The backward is about to run; only in training, like the events up to OPTIMIZER_STEP_COMPLETED."""
    BACKWARD_COMPLETED = "backward_completed", "iteration"
    """The gradients of this batch were added to those of the window."""
    GRADIENTS_READY = "gradients_ready", "iteration"
    """The gradients of the whole window: measure or clip them, or skip the step."""
    OPTIMIZER_STEP_STARTED = "optimizer_step_started", "iteration"
    """The optimizer is about to step."""
    OPTIMIZER_STEP_COMPLETED = "optimizer_step_completed", "iteration"
    """The optimizer has stepped; also emitted after a skipped step, see ``update.skipped``."""
    UPDATE_COMPLETED = "update_completed", "iteration"
    """One update of the iteration is complete."""
    UPDATE_RETRIED = "update_retried", "fired"
    """Computing the gradients failed and is tried again."""
    ITERATION_COMPLETED = "iteration_completed", "iteration"
    """All updates of the iteration are complete."""
    EPOCH_COMPLETED = "epoch_completed", "epoch"
    """All batches of the epoch were used, or `Engine.terminate_epoch` ended it."""
    COMPLETED = "completed", None
    """The run is complete, also after a stop; not after an error."""
    TERMINATED = "terminated", None
    """A stop took effect; just before COMPLETED."""
    PREEMPTED = "preempted", None
    """Save now: the run stops afterwards; see `Boundary.preempt`."""
    INTERRUPTED = "interrupted", None
    """A KeyboardInterrupt ends the run."""
    EXCEPTION_RAISED = "exception_raised", None
    """An error, ``state.exception``, ends the run."""
    ENDED = "ended", None
    """The run is over, in whatever way."""
    DATA_EXHAUSTED = "data_exhausted", "fired"
    """The data ended inside an epoch of a given length, and is iterated again."""
    EVALUATION_STARTED = "evaluation_started", "fired"
    """A region, on the engine that requested the evaluation."""
    EVALUATION_COMPLETED = "evaluation_completed", "fired"
    """``state.metrics`` holds the results of the evaluation."""
    CHECKPOINT_STARTED = "checkpoint_started", "fired"
    """A region, on the main thread: a checkpoint is about to be taken and written."""
    CHECKPOINT_SAVING = "checkpoint_saving", "fired"
    """A region: weights are about to be read for an export."""
    CHECKPOINT_SAVED = "checkpoint_saved", "fired"
    """A checkpoint is durably on disk."""
    WEIGHTS_LOADED = "weights_loaded", "fired"
    """Other weights were loaded: `Engine.load_weights`."""
    IMAGE_LOGGED = "image_logged", "fired"
    """``engine.log.entry`` is an image; see `Log`."""
    FIGURE_LOGGED = "figure_logged", "fired"
    """``engine.log.entry`` is a matplotlib figure."""
    TEXT_LOGGED = "text_logged", "fired"
    """``engine.log.entry`` is a text."""
    HISTOGRAM_LOGGED = "histogram_logged", "fired"
    """``engine.log.entry`` is a tensor whose distribution is of interest."""
    HYPERPARAMETERS_LOGGED = "hyperparameters_logged", "fired"
    """``engine.log.given`` holds new hyperparameters; also emitted outside a run."""


class Lifecycle(EventEnum):
    """What the engine tells its own services, at moments of which users' features need not know; see `Bus.notify`.

    Each says in brackets what its receivers are called with, after the engine. None has a count, and none is saved.
    """

    CONNECTED = "connected", None
    """A function was connected (signal, connection, those of the same function that were there)."""
    ATTACHED = "attached", None
    """A handler is about to be attached (handler)."""
    JOINING = "joining", None
    """A handler is about to join a run (handler)."""
    REMARKED = "remarked", None
    """Something looks wrong, and may be meant (the arguments of `Reports.report`)."""
    RUN_BEGAN = "run_began", None
    """A run begins; nothing of it is set up."""
    DATA_CHANGED = "data_changed", None
    """The data of the run is not that of the run before."""
    BUILT = "built", None
    """The optimizers are built, and STARTED is about to be emitted."""
    LOADING = "loading", None
    """STARTED's receivers have run: a loaded state is put in place, and the data is looked at."""
    CONTINUING = "continuing", None
    """The state is that with which the run continues."""
    RESUMED = "resumed", None
    """A loaded state is in place (state, names that may differ, the engine's own seed, whether weights were changed since)."""
    READY = "ready", None
    """All is in place, and no event of the first epoch was emitted."""
    STARTING = "starting", None
    """What had to wait for the start was attended to; the loop begins."""
    EPOCH_BEGAN = "epoch_began", None
    """An epoch begins, or one is continued (whether it is continued)."""
    PASS_BEGINS = "pass_begins", None
    """A pass over the data is about to draw its order."""
    DATA_ENDED = "data_ended", None
    """An epoch has used its data (whether the data would give more)."""
    EPOCH_ENDS = "epoch_ends", None
    """An epoch is complete, and EPOCH_COMPLETED is about to be emitted."""
    RECOMPUTING = "recomputing", None
    """The gradients of a window are about to be computed again (update, iteration)."""
    STATE_TAKEN = "state_taken", None
    """A whole state was taken (the state, whether it is written at once)."""
    WEIGHTS_GIVEN = "weights_given", None
    """Weights were put in place (the whole state that they are of; empty without one)."""
    EVALUATING = "evaluating", None
    """An evaluation begins (evaluator)."""
    EVALUATED = "evaluated", None
    """It is over (evaluator, what it measured, how often each metric had been written before, prefix)."""
    FINISHING = "finishing", None
    """The last iteration was made, and TERMINATED or COMPLETED is about to be emitted."""
    FAILED = "failed", None
    """A part of a micro-step has raised an error (error, part, update)."""
    RUN_FAILED = "run_failed", None
    """An error ends the run (error, whether updates were under way, how many of several had been made)."""
    CLOSED = "closed", None
    """A run is over, and all that its handlers entered is left."""
