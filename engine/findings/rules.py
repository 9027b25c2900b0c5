"""The rules of `check`: each is a function of a `Composition` that yields findings."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..authoring.interval import Interval
from ..authoring.planning import comes_up
from ..core.connection import Connection
from ..core.events import AnyEvent, Events, resolve
from ..core.settings import is_default
from ..core.words import listed
from .composition import Composition, in_training
from .data_rules import OF_BATCHES, OF_DATA
from .function_rules import OF_FUNCTIONS
from .model_rules import OF_MODELS
from .parameter_rules import OF_PARAMETERS
from .reports import Finding, finding

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["OF_BATCHES", "OF_COMPOSITIONS"]

Rule = Callable[[Composition], Iterator[Finding]]


# ---- metrics ----------------------------------------------------------------------------------------------------------


def monitored_by_nobody_produced(it: Composition) -> Iterator[Finding]:
    names = {name.replace("/", "_") for name in it.produced}
    for handler, monitor in it.monitors:
        if _is_produced(monitor.metric.replace("/", "_"), names):
            continue
        there = ", ".join(sorted(it.produced)) or "none"
        if it.may_write_metrics:
            yield finding(
                "C01",
                f"{handler.name!r} monitors {monitor.metric!r}, which no handler announces (announced: {there})",
                "if your own function writes the metric, announce it: engine.state.metrics.announce('user', "
                f"[{monitor.metric!r}])",
                [handler.name],
                "info",
            )
        else:
            yield finding(
                "C01",
                f"{handler.name!r} monitors {monitor.metric!r}, which nothing measures; available metrics: {there}",
                "attach Metrics or Validation with this metric, or monitor one of the available metrics",
                [handler.name],
            )


def _is_produced(asked: str, names: set[str]) -> bool:
    """Whether a metric is among these, or one value of a metric that has several."""
    return asked in names or f"val_{asked}" in names or any(asked.startswith(f"{name}_") for name in names)


def produced_and_read_by_nobody(it: Composition) -> Iterator[Finding]:
    monitored = {monitor.metric for _, monitor in it.monitors}
    if any(map(_may_read_metrics, it.engines)):
        return
    unread: dict[str, list[str]] = defaultdict(list)
    for metric, owner in it.produced.items():
        if owner and metric not in monitored:
            unread[owner].append(metric)
    for name, metrics in sorted(unread.items()):
        yield finding(
            "C02",
            f"{name!r} produces {listed(metrics)}, but no handler monitors, logs or shows these values during the run",
            "attach a logger, ProgressBar or History to see every value; the last value is in engine.state.metrics",
            [name],
        )


# ---- receivers --------------------------------------------------------------------------------------------------------


def _may_read_metrics(engine: Engine) -> bool:
    """Whether a logger, a display or a function may read metrics."""
    connections = (one for signal in engine.signals.all() for one in signal.connections)
    return any(one.reads is None or "metrics" in one.reads for one in connections)


def receivers_without_an_order(it: Composition) -> Iterator[Finding]:
    for signal in it.engine.signals.all():
        at_once: dict[tuple[int, int], list[Connection]] = defaultdict(list)
        for one in signal.connections:
            at_once[int(one.phase), one.rank].append(one)
        for several in at_once.values():
            for place, one in enumerate(several):
                for other in several[place + 1 :]:
                    # Of one class, or a method of one base: they exclude each other, take turns, or commute.
                    alike = it.kind_of(one) is it.kind_of(other) or _function_of(one) is _function_of(other)
                    thing = None if alike or _are_of_two_updates(it, one, other) else _conflict(one, other)
                    if thing is not None:
                        yield finding(
                            "C03",
                            f"{one!r} and {other!r} both use {thing!r} at {signal.event.name}, in phase "
                            f"{one.phase.name} with rank {one.rank}, and at least one of the two writes {thing!r}, "
                            "so the order in which you attach them may matter",
                            "give one of the two a different phase or rank: @on(..., phase=, rank=)",
                            [str(one.owner), str(other.owner)],
                        )


def _are_of_two_updates(it: Composition, *several: Connection) -> bool:
    """Whether two receivers belong to handlers of different updates."""
    handlers = [it.engine.handlers.get(one.owner or "") for one in several]
    first, second = (getattr(handler, "update", None) for handler in handlers)
    return None not in (first, second) and first != second


def _function_of(one: Connection) -> Any:
    return getattr(one.receiver, "__func__", one.receiver)


# Two receivers may write these in either order: each writes entries, files or requests of its own.
_OWN = frozenset({"metrics", "files", "stop", "step", "flags", "processes", "signals", "state", "error"})


def _conflict(one: Connection, other: Connection) -> str | None:
    """A thing that one of two receivers writes and the other one uses; None if there is none, or they declare nothing."""
    if one.reads is None or one.writes is None or other.reads is None or other.writes is None:
        return None
    used = (one.writes & (other.reads | other.writes)) | (other.writes & one.reads)
    return min(used - _OWN, default=None)


def intervals_that_never_come_up(it: Composition) -> Iterator[Finding]:
    for handler in it.handlers:
        every = getattr(handler, "every", None)
        if not isinstance(every, str | Interval | AnyEvent) or comes_up(it.engine, every) is not False:
            continue
        if _has_another_interval(it, handler.name):
            continue
        severity = "warning" if getattr(handler, "interval_matters", False) else "info"
        if severity == "info" and (not it.engine.training or is_default(handler, "every")):
            continue  # an evaluation is as long as its data; a default is meant for longer runs
        when = f"at {every}" if isinstance(every, AnyEvent) else f"every {every}"
        yield finding(
            "C17",
            f"{handler.name!r} runs {when}, but is never due in this run{_extent(it)}",
            "use a shorter interval, or a longer run",
            [handler.name],
            severity,  # type: ignore[arg-type]
        )
    yield from _functions_that_never_come_up(it)


def _functions_that_never_come_up(it: Composition) -> Iterator[Finding]:
    for signal in it.engine.signals.all():
        for one in signal.connections:
            if one.owner is None and _comes_up(it, signal.event, one) is False:
                yield finding(
                    "C17",
                    f"the function {one!r} is connected to {signal.event}({one.filter}), which does not occur in "
                    f"this run{_extent(it)}",
                    "choose a different filter, or a longer run",
                    severity="info",
                )


def _has_another_interval(it: Composition, name: str) -> bool:
    """Whether a handler has a receiver whose filter lets something through in this run, such as the first iterations."""
    own = ((signal.event, one) for signal in it.engine.signals.all() for one in signal.connections if one.owner == name)
    return any(_comes_up(it, event, one) for event, one in own)


def _comes_up(it: Composition, event: Any, one: Connection) -> bool | None:
    """Whether a receiver's filter lets something through in this run; None if that is not known, or if it has no filter."""
    if one.filter is None:
        return None
    names = ("every", "once", "after", "before", "when")
    arguments = {name: value for name in names if (value := getattr(one.filter, name)) is not None}
    return comes_up(it.engine, event(**arguments))


def _extent(it: Composition) -> str:
    state = it.engine.state
    bounds = ((state.max_epochs, "epochs"), (state.max_iters, "iterations"), (state.max_steps, "optimizer steps"))
    given = [f"{number} {unit}" for number, unit in bounds if number is not None]
    return " of at most " + " and ".join(given) if given else ""


# ---- files ------------------------------------------------------------------------------------------------------------


def one_file_for_two(it: Composition) -> Iterator[Finding]:
    writers: dict[str, list[str]] = defaultdict(list)
    for engine in it.engines:
        for handler in engine.handlers.values():
            if handler.enabled and handler.writes and (place := _place(handler)) is not None:
                writers[place].append(handler.name if engine is it.engine else f"{handler.name} of the evaluator")
    for place, names in writers.items():
        if len(names) > 1:
            yield finding(
                "C10",
                f"{' and '.join(map(repr, names))} write to {place!r}",
                "give each handler its own file or folder",
                names,
            )


def _place(handler: Any) -> str | None:
    """What a handler alone should write: a file, or the names of its files in a folder."""
    if (path := getattr(handler, "path", None)) is not None:
        return str(os.path.abspath(path))
    if (folder := getattr(handler, "folder", None)) is None:
        return None
    template = str(getattr(getattr(handler, "filename", None), "text", "{name}"))
    return os.path.join(os.path.abspath(folder), template.replace("{name}", handler.name))


def best_of_nothing(it: Composition) -> Iterator[Finding]:
    monitored = {handler.name for handler, _ in it.monitors}
    for handler in it.handlers:
        filename = str(getattr(getattr(handler, "filename", None), "text", ""))
        named = filename and ("best" in handler.name or "best" in filename)
        every = getattr(handler, "every", None)
        if named and handler.name not in monitored and not _is_chosen(every) and not _is_of_restored(it, every):
            yield finding(
                "C11",
                f"the name or filename of {handler.name!r} contains 'best', but it keeps the latest checkpoints, because it "
                "monitors no metric",
                "name the metric that selects the best: Checkpoint(..., monitor='accuracy')",
                [handler.name],
            )


def _is_chosen(every: Any) -> bool:
    """Whether a function of the user's decides when: by a condition, or by an event of its own."""
    if not isinstance(every, AnyEvent):
        return False
    return any(
        isinstance(event, Events) is False or (of is not None and of.when is not None) for event, of in resolve(every)
    )


def _is_of_restored(it: Composition, every: Any) -> bool:
    """Whether a checkpoint is saved at the end of a run, when a handler has restored the best weights."""
    at_end = isinstance(every, AnyEvent) and all(event is Events.COMPLETED for event, _ in resolve(every))
    return at_end and any(getattr(one, "restore_event", None) is not None for one in it.handlers)


def hyperparameters_written_by_nobody(it: Composition) -> Iterator[Finding]:
    given = it.engine.log.given
    if given and not it.engine.signal(Events.HYPERPARAMETERS_LOGGED).receivers:
        yield finding(
            "W39",
            f"log.hyperparameters() was given {listed(given)}, but no attached handler writes hyperparameters",
            "attach a logger that writes them, such as TensorBoardLogger, or connect a function to "
            "Events.HYPERPARAMETERS_LOGGED",
        )


OF_COMPOSITIONS: Sequence[Rule] = (
    monitored_by_nobody_produced,
    in_training(produced_and_read_by_nobody),
    receivers_without_an_order,
    *OF_FUNCTIONS,
    *map(in_training, OF_MODELS),
    intervals_that_never_come_up,
    *map(in_training, OF_PARAMETERS),
    one_file_for_two,
    best_of_nothing,
    hyperparameters_written_by_nobody,
    *OF_DATA,
)
"""Rules that need no batch: they are also checked when a run starts."""
