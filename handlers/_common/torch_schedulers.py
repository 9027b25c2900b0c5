"""Helpers to build and step torch's learning-rate schedulers."""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from signalfire import Interval
from signalfire.updates.optimizers import optimizers_of

__all__ = [
    "SCHEDULER_OPTIONS",
    "base_of",
    "check_drivable",
    "check_factory",
    "check_kind",
    "different_arguments",
    "given_argument",
    "kind_of_scheduler",
    "missing_total",
    "name_of",
    "restore_rates",
    "set_mode",
    "step",
    "takes_count",
    "takes_metric",
    "unwrap_step",
    "with_total",
]

_TOTALS = {
    "total_steps": (),
    "T_max": (),
    "num_training_steps": ("num_stable_steps",),  # Hugging Face
    "t_initial": (),  # timm
}
"""The names of the argument for the number of steps, each with those that may be given in its place."""

SCHEDULER_OPTIONS = {
    option: f"an option of the scheduler: partial({kind.__name__}, {option}=...)"
    for kind in reversed(vars(lr_scheduler).values())
    if isinstance(kind, type) and issubclass(kind, LRScheduler)
    for option in list(inspect.signature(kind).parameters)[1:]
}
"""The message for an option of torch's schedulers that is given to the handler itself."""


def base_of(factory: Any) -> Any:
    """The innermost function of nested ``partial`` objects."""
    while isinstance(factory, partial):
        factory = factory.func
    return factory


def check_factory(scheduler: Any) -> None:
    """Raise TypeError for an object that builds no scheduler in ``LRScheduling(scheduler)``."""
    if not callable(scheduler):
        raise TypeError(
            f"LRScheduling({scheduler!r}): expected a factory, such as partial(StepLR, step_size=30), not a scheduler, "
            "because the optimizer may not exist yet"
        )
    if inspect.isfunction(base := base_of(scheduler)) and base.__module__ == "signalfire.handlers.schedules":
        given = ", ".join(f"{name}={value!r}" for name, value in getattr(scheduler, "keywords", {}).items())
        raise TypeError(
            f"LRScheduling({scheduler!r}): {base.__name__} is a function that returns a factory; call it: "
            f"{base.__name__}({given or '...'})"
        )


def given_argument(factory: Any, name: str) -> Any:
    """The value of a keyword argument in nested ``partial`` objects; None if it is in none of them."""
    while isinstance(factory, partial):
        if name in factory.keywords:
            return factory.keywords[name]
        factory = factory.func
    return None


def kind_of_scheduler(scheduler: Any, warmup: Any = None) -> str:
    """The name of a scheduler's class, with those of its parts, such as "SequentialLR(LinearLR, StepLR)"."""
    names = getattr(scheduler, "names", None)  # of the optimizers that are scheduled together
    parts = [kind_of_scheduler(one) for one in getattr(scheduler, "_schedulers", None) or ()]
    parts = [f"{name}={part}" for name, part in zip(names, parts, strict=True)] if names else parts
    kind = f"{type(scheduler).__name__}({', '.join(parts)})" if parts else type(scheduler).__name__
    return kind if warmup is None else f"{kind} with the warm-up {kind_of_scheduler(warmup)}"


def check_kind(name: str, then: str | None, here: str | None) -> None:
    """Raise ValueError for the saved state of a different schedule. States of 0.2 and before do not name their schedule."""
    if then is not None and here is not None and then != here:
        raise ValueError(
            f"the schedule of {name!r} was a {then} when the state was saved, but is a {here} now; use the schedule of "
            "the saved run. To continue the saved run with a different schedule, give the handler a different name, as "
            f"in LRScheduling(..., name='next'), and write load_state_dict(state, allow=[{name!r}, 'next'])"
        )


_PROGRESS = {
    *("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"),
    *("mode", "mode_worse"),  # of a plateau schedule, which follows its metric
    "base_lrs",  # options of the optimizer
}


def different_arguments(scheduler: Any, state: Mapping[str, Any]) -> list[str]:
    """The arguments in which a torch scheduler differs from a saved state of its class, in words."""
    found = []
    for part, saved in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False):
        found += different_arguments(part, saved)
    if not type(scheduler).__module__.startswith("torch."):
        return found
    for key, here in scheduler.state_dict().items():
        then = state.get(key, here)
        if key[0] != "_" and key not in _PROGRESS and _is_plain(here) and _is_plain(then) and here != then:
            found.append(
                f"{key}={here!r} of the {type(scheduler).__name__} is not used, because the saved state has "
                f"{key}={then!r}"
            )
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | Counter) or (isinstance(value, list) and all(map(_is_plain, value)))


def set_mode(scheduler: ReduceLROnPlateau, mode: Literal["min", "max"]) -> None:
    """Make a plateau schedule minimize or maximize; its counts stay as they are."""
    if scheduler.mode == mode:
        return
    state = scheduler.state_dict()
    best = state["best"]
    if math.isinf(best):  # no value yet: it is the worst one of the other mode
        best = -math.inf if mode == "max" else math.inf
    scheduler.load_state_dict(state | {"mode": mode, "best": best})


def missing_total(factory: Any) -> str | None:
    """Name of the factory's argument for the number of steps, if it has one that is required and not given."""
    own = getattr(factory, "missing_total", None)
    if own is not None:
        return "total_steps" if own() else None
    try:
        parameters = inspect.signature(factory, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return None
    if isinstance(factory, partial) and {"epochs", "steps_per_epoch"} <= set(factory.keywords):
        return None  # OneCycleLR derives its total from these
    for name, others in _TOTALS.items():
        parameter = parameters.get(name)
        if any(given_argument(factory, other) is not None for other in others):
            continue
        if parameter is not None and parameter.default in (inspect.Parameter.empty, None):
            return name
    return None


def takes_count(scheduler: Any) -> bool:
    """Whether a scheduler takes the number of steps or epochs as an argument, as timm's do, instead of counting them."""
    return hasattr(scheduler, "step_update")


def takes_metric(scheduler: Any) -> bool:
    """Whether a scheduler is stepped with the value of a metric: ReduceLROnPlateau, or one whose ``step`` requires an argument.

    timm's are stepped with a number of epochs or updates.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        return True
    if hasattr(scheduler, "step_update"):
        return False
    try:
        first = next(iter(inspect.signature(scheduler.step).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return first is not None and first.kind in positional and first.default is inspect.Parameter.empty


def check_drivable(name: str, scheduler: Any, every: Interval, *, monitored: bool) -> None:
    """Raise ValueError for a scheduler that cannot be stepped in the way that a handler steps it.

    Args:
        name: Name of the handler.
        scheduler: The scheduler.
        every: Interval between steps without a metric.
        monitored: Whether it is stepped with the values of a metric.
    """
    kind = type(scheduler).__name__
    if takes_count(scheduler) and isinstance(getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau):
        raise ValueError(
            f"{name!r}: the {kind} does not save its state; use torch's scheduler, and pass the name of the metric: "
            "LRScheduling(partial(ReduceLROnPlateau, ...), monitor=...)"
        )
    if takes_metric(scheduler) and not monitored:
        raise ValueError(
            f"{name!r}: the factory returned a {kind}, which is stepped with a metric; pass the name of the metric as "
            "monitor="
        )
    if monitored and not takes_metric(scheduler):
        raise ValueError(
            f"{name!r}: monitor= is for schedulers that are stepped with a metric, such as ReduceLROnPlateau, but the factory "
            f"returned a {kind}; omit monitor="
        )
    by_epoch = every.unit == "ep"
    if takes_count(scheduler) and getattr(scheduler, "t_in_epochs", True) != by_epoch:
        counted, way_out = (
            ("steps", "t_in_epochs=True, or every='1step'")
            if by_epoch
            else ("epochs", "t_in_epochs=False, or every='1ep'")
        )
        raise ValueError(
            f"{name!r}: the {kind} counts {counted}, which does not match every={str(every)!r}; write {way_out}"
        )


def name_of(factory: Any) -> str:
    """The name of a factory's innermost function, for messages."""
    return getattr(base_of(factory), "__name__", repr(factory))


def with_total(factory: Any) -> str:
    """How a factory is given its number of steps, for messages: "partial(get_linear_schedule, num_training_steps=...)".

    With several factories by optimizer, each factory that lacks the number is named.
    """
    if isinstance(several := getattr(factory, "factories", None), dict):
        lacking = {name: one for name, one in several.items() if missing_total(one) is not None}
        return ", ".join(f"{name!r}: {with_total(one)}" for name, one in lacking.items())
    given = (name for name in _TOTALS if given_argument(factory, name) is not None)
    argument = missing_total(factory) or next(given, "total_steps")
    return f"partial({getattr(base_of(factory), '__name__', 'factory')}, {argument}=...)"


def unwrap_step(optimizer: Optimizer) -> None:
    """Remove the wrapper that a scheduler puts around ``optimizer.step``.

    torch uses it only to warn about calls in the wrong order, which the engine rules out.
    """
    for one in {optimizer, *optimizers_of(optimizer)}:
        if hasattr(vars(one).get("step"), "_wrapped_by_lr_sched"):
            del one.step


def step(scheduler: Any) -> None:
    """Step a scheduler without torch's warning at the first step about the wrapper that `unwrap_step` removed."""
    if not _is_new(scheduler):
        scheduler.step()
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*optimizer.step.*", category=UserWarning)
        scheduler.step()


def _is_new(scheduler: Any) -> bool:
    """Whether the scheduler, or one that it chains, has not been stepped yet."""
    if getattr(scheduler, "_step_count", 2) <= 1:
        return True
    inner = getattr(scheduler, "_schedulers", None)
    return inner is not None and any(map(_is_new, inner))


def restore_rates(optimizer: Optimizer) -> None:
    """Reset each parameter group to its initial learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])
