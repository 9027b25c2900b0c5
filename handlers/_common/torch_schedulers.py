"""What building and driving torch's learning-rate schedulers takes. Not a handler."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

from torch.optim import Optimizer

__all__ = ["base_of", "missing_total", "restore_rates", "step", "unwrap_step"]

_TOTALS = ("total_steps", "T_max")


def base_of(factory: Any) -> Any:
    """What a factory calls in the end: the innermost function of nested ``partial`` objects."""
    while isinstance(factory, partial):
        factory = factory.func
    return factory


def missing_total(factory: Any) -> str | None:
    """The argument for the number of steps that the factory takes, has no value for, and cannot do without."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None
    if isinstance(factory, partial) and {"epochs", "steps_per_epoch"} <= set(factory.keywords):
        return None  # OneCycleLR's other way to be told
    for name in _TOTALS:
        parameter = parameters.get(name)
        if parameter is not None and parameter.default in (inspect.Parameter.empty, None):
            return name
    return None


def unwrap_step(optimizer: Optimizer) -> None:
    """Take off the wrapper that a scheduler puts around ``optimizer.step``.

    torch does so only to warn about a wrong order, which the engine rules out.
    """
    if hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        del optimizer.step


def step(scheduler: Any) -> None:
    """Let a scheduler make its next step; at its first one torch looks for the wrapper that `unwrap_step` took off."""
    if not _is_new(scheduler):
        scheduler.step()
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*optimizer.step.*", category=UserWarning)
        scheduler.step()


def _is_new(scheduler: Any) -> bool:
    """Whether it, or one of those that it consists of, has not made a step yet."""
    if getattr(scheduler, "_step_count", 2) <= 1:
        return True
    inner = getattr(scheduler, "_schedulers", None)
    return inner is not None and any(map(_is_new, inner))


def restore_rates(optimizer: Optimizer) -> None:
    """Give each parameter group the rate back that the optimizer was built with."""
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])
