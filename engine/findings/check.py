"""A linter of compositions: what looks wrong before anything runs. `Engine.check` and the start of a run call it.

The rules are in `rules`; a handler adds its own in `Handler.findings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..authoring.elsewhere import BOUNDS, misuse
from ..authoring.randomness import unchanged_random_state
from ..data.extent import known_length
from .composition import Composition
from .reports import Finding, Findings, failed_look
from .rules import OF_BATCHES, OF_COMPOSITIONS

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["check", "report"]


def check(engine: Engine, data: Any, bounds: dict[str, Any]) -> Findings:
    """What looks wrong about a composition and its data, before it runs; see `Engine.check`."""
    if engine.running:
        raise RuntimeError(
            "check() was called during a run; call it before run() (run() itself reports the same findings)"
        )
    with unchanged_random_state(), _bounded(engine, data, bounds) as source:
        composition = Composition(engine, source, reads_batch=True)
        return Findings(one for one in _found(composition) if not engine.findings.is_allowed(one.code))


def report(engine: Engine) -> None:
    """Report what looks wrong at the start of the first run, without reading a batch."""
    if engine.findings.checked:
        return
    engine.findings.checked = True
    if engine.state.iteration > 0 or not engine.processes.is_rank_zero:
        return  # a run that continues a saved one was checked when it began
    data = None if engine.feed.source is None else engine.feed.source.given
    for one in _found(Composition(engine, data, reads_batch=False)):
        engine.findings.add(one, key=one.sentence)


_OF_LENGTH = {"C05", "C06", "C14", "C17", "C18", "C19", "C22"}
"""What is expected of a run whose data a handler limits, for debugging."""


def _found(composition: Composition) -> Iterator[Finding]:
    engine = composition.engine
    limited = engine.overrides.data is not None or engine.dry_run
    return (one for one in _all_found(composition) if not (limited and one.code in _OF_LENGTH))


def _all_found(composition: Composition) -> Iterator[Finding]:
    for rule in OF_COMPOSITIONS:
        yield from _looked(rule, composition)
    if composition.reads_batch:
        _ = composition.first_batch  # an error of the data is the user's, and not one of a rule
        for rule in OF_BATCHES:
            yield from _looked(rule, composition)
    for handler in composition.handlers:
        yield from _looked(handler.findings, composition.engine)


def _looked(rule: Callable[[Any], Iterable[Finding]], argument: Any) -> Iterator[Finding]:
    """What a rule finds; one that raises an error finds nothing, and is skipped."""
    try:
        found = [*rule(argument)]
    except Exception as error:
        found = [failed_look(getattr(rule, "__qualname__", repr(rule)), error)]
    yield from found


@contextmanager
def _bounded(engine: Engine, data: Any, bounds: dict[str, Any]) -> Iterator[Any]:
    """Put the run's bounds and the epoch length in the state for the ``with`` block; yields the data that would be iterated."""
    state = engine.state
    names = ("epoch_length", "max_epochs", "max_iters", "max_steps", "max_seconds", "min_epochs", "min_iters")
    before = {name: getattr(state, name) for name in names}
    try:
        if engine.overrides.data is not None and data is not None:
            data = engine.overrides.data(engine, data)
        arguments: dict[str, Any] = dict.fromkeys(BOUNDS) | {"min_epochs": 0, "min_iters": 0}
        if unknown := sorted(set(bounds) - set(arguments)):
            raise TypeError(misuse("check()", (), unknown, BOUNDS))
        if bounds:
            given = arguments | bounds
            given["seconds"] = engine.seconds_in(given.pop("max_time"))
            state.set_bounds(engine.training, True, **given)
        state.epoch_length = (
            bounds.get("epoch_length") or known_length(data) or (None if data is not None else state.epoch_length)
        )
        yield data
    finally:
        for name, value in before.items():
            setattr(state, name, value)
