"""Checks the variants of a study: runs each up to STARTED, without training, to find invalid ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from signalfire import Engine, Events, Handler, Phase
from signalfire.authoring.checks import did_you_mean
from signalfire.authoring.monitor import Monitor
from signalfire.core.handler import Subscription
from signalfire.core.overrides import Override

from .arguments import message_of
from .composition import writes_or_shows
from .designs import Factories
from .results import Variant
from .runs import Run, exchange

__all__ = ["candidates", "start", "try_all", "try_out"]

_CHANGING = (Phase.CHANGE, Phase.FINALIZE, Phase.CONTROL)
_BESIDE_TRAINING = {"metrics", "files", "processes", "signals", "state", "device", "random", "error"}
"""What receivers may write, as they declare it, without an effect on the training."""


class _Started(BaseException):
    """Ends a run at STARTED; not an `Exception`, so that ``except Exception`` does not catch it."""


def start(engine: Engine, run: Run, what: str) -> dict[str, str]:
    """Run the engine up to STARTED, without files; returns the handler that announces each metric."""
    announced: dict[str, str] = {}

    def stop(engine: Engine) -> None:
        announced.update(engine.state.metrics.owners)
        raise _Started

    was_dry, engine.dry_run = engine.dry_run, True
    try:
        with engine.connect(Events.STARTED, stop, phase=Phase.PERSIST, rank=sys.maxsize):
            run(engine)
    except _Started:
        return announced
    except Exception as error:
        error.add_note(f"raised while checking {what} by running it up to STARTED")
        raise
    finally:
        engine.dry_run = was_dry
        engine.reset()
    raise RuntimeError(f"{run!r} did not run the engine that build({engine.seed}) returned")


def try_out(
    engine: Engine, run: Run, variant: Variant, factories: Factories, reference: Mapping[str, str], metric: str
) -> list[str]:
    """Run a variant up to STARTED; returns the names of its enabled handlers.

    Args:
        engine, run: The composition; afterwards the engine is as before.
        variant: The variant to check.
        factories: Factories of the alternatives, by the names of the handler and the alternative.
        reference: Return value of `start` for the composition as built.
        metric: Name of the metric that the study compares.

    Raises:
        ValueError: if the variant is invalid.
    """
    for name in (*sorted(variant.off), *(name for name, _ in variant.swapped)):
        _check_enabled(engine, name)
    originals = [(engine.handlers[name], engine.handlers.place_of(name)) for name, _ in variant.swapped]
    others: list[Handler] = []
    try:
        with engine.without(*sorted(variant.off)):
            for swap in variant.swapped:
                others.append(exchange(engine, swap[0], factories[swap]))
            announced = start(engine, run, f"the variant {variant.name!r}")
            on = [handler for handler in engine.handlers.values() if handler.enabled]
            _check_announced(on, announced, reference, metric)
            return sorted(handler.name for handler in on)
    finally:
        for handler in others:
            engine.detach(handler)
        for handler, place in originals:
            if handler.engine is None:
                engine.handlers.attach([handler], place=place)


def _check_announced(
    on: Sequence[Handler], announced: Mapping[str, str], reference: Mapping[str, str], metric: str
) -> None:
    """Raise an error if a metric that is monitored or compared is missing without the handlers that are off."""
    monitored = {
        one.metric: f"{handler.name!r} monitors"
        for handler in on
        for one in vars(handler).values()
        if isinstance(one, Monitor)
    }
    for needed, why in {**monitored, metric: "the study compares"}.items():
        if needed in reference and needed not in announced:
            raise ValueError(f"the metric {needed!r}, which {why}, does not exist without {reference[needed]!r}")


def try_all(
    variants: Sequence[Variant],
    composed: Callable[[Variant], AbstractContextManager[tuple[Engine, Run]]],
    factories: Factories,
    reference: Mapping[str, str],
    metric: str,
) -> dict[str, list[str]]:
    """Run each variant up to STARTED; returns the names of its enabled handlers, by its name.

    Args:
        composed: Gives the engine and the function that runs it, for the arguments of a variant.
        variants, factories, reference, metric: As for `try_out`.

    Raises:
        ValueError: if some variants are invalid; it names all of them.
    """
    enabled = {}
    problems: list[tuple[str, Exception]] = []
    for variant in variants:
        try:
            with composed(variant) as (engine, run):
                enabled[variant.name] = try_out(engine, run, variant, factories, reference, metric)
        except Exception as error:
            problems.append((variant.name, error))
    if problems:
        listing = "\n".join(f"- {name!r}: {message_of(error)}" for name, error in problems)
        raise ValueError(
            "some variants are invalid (remove them, or put handlers that depend on each other in one group):\n"
            f"{listing}"
        ) from problems[0][1]
    return enabled


def candidates(engine: Engine, announced: Mapping[str, str], handlers: Sequence[str] | None) -> list[str]:
    """The names of the handlers that designs switch: ``handlers``, by default those that affect the training."""
    if handlers is not None:
        for name in handlers:
            _check_attached(engine, name)
        return list(handlers)
    measuring = set(announced.values())
    found = []
    for name, handler in engine.handlers.items():
        changes = any(map(_changes_training, handler.subscriptions))
        sets_up = engine.has(name, Events.MODEL_SETUP)
        overrides = any(isinstance(one, Override) for one in engine.overrides.owned_by(name))
        omitted = writes_or_shows(handler) or sets_up or name in measuring
        if handler.enabled and not omitted and (overrides or changes):
            found.append(name)
    return found


def _changes_training(receiver: Subscription) -> bool:
    """Whether a receiver may affect the training: by what it declares to write, or else by its phase."""
    return receiver.phase in _CHANGING if receiver.writes is None else bool(receiver.writes - _BESIDE_TRAINING)


def _check_attached(engine: Engine, name: str) -> None:
    if name not in engine.handlers:
        raise ValueError(
            f"build attaches no handler {name!r}; attached handlers: "
            f"{', '.join(engine.handlers) or 'none'}{did_you_mean(name, list(engine.handlers))}"
        )


def _check_enabled(engine: Engine, name: str) -> None:
    _check_attached(engine, name)
    if not engine.handlers[name].enabled:
        is_output = writes_or_shows(engine.handlers[name])
        who = "the study; set files=True to keep the handler on" if is_output else "build; enable it in build"
        raise ValueError(f"the handler {name!r} is already switched off by {who}")
