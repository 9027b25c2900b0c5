"""Checks of the metrics by name that `Metrics` and `Validation` take, and the names of their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from signalfire import Engine
from signalfire.authoring import map_leaves
from signalfire.updates.places import described

from .measures import Average

__all__ = ["Metric", "copied", "is_of_loss", "named_metrics", "output_and_target", "plain", "shown"]


@runtime_checkable
class Metric(Protocol):
    """The interface of torchmetrics metrics: any object with these three methods."""

    def reset(self) -> None: ...
    def update(self, *inputs: Any) -> None: ...
    def compute(self) -> Any: ...


def named_metrics(metrics: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """All metrics by name, functions as averages."""
    if metrics is not None and not isinstance(metrics, Mapping | torch.nn.ModuleDict):
        raise TypeError(_without_names(metrics))
    found = {key: _as_metric(key, metric) for key, metric in {**(metrics or {}), **named}.items()}
    if not found:
        raise ValueError("Metrics(): pass at least one metric, such as accuracy=Accuracy()")
    places: dict[int, str] = {}
    for key, metric in found.items():
        if (other := places.setdefault(id(metric), key)) != key:
            raise ValueError(
                f"Metrics({other}=..., {key}=...): both are the same {type(metric).__name__} object, which would count "
                "each batch twice; build a separate object for each name"
            )
    return found


def _without_names(metrics: Any) -> str:
    """The error for a metric, or any other object, in place of metrics by name."""
    if isinstance(metrics, str):
        known = {"accuracy": "Accuracy()", "loss": "Average()"}
        return (
            f"Metrics({metrics!r}): expected a metric, or a function that maps (output, target) to the batch mean, as "
            f"a keyword argument; write Metrics({metrics}={known.get(metrics.lower(), '...')})"
        )
    kind = type(metrics).__name__
    if not callable(getattr(metrics, "update", metrics)):
        return f"Metrics(metrics={metrics!r}): expected a mapping from names to metrics"
    return f"Metrics(metrics={kind}()): a metric needs a name; write Metrics({kind.lower()}={kind}())"


def _as_metric(key: str, metric: Any) -> Any:
    if isinstance(metric, type):
        raise TypeError(f"Metrics({key}={metric.__name__}): expected an instance; write {metric.__name__}()")
    if not isinstance(metric, Metric) and not callable(metric):
        raise TypeError(
            f"Metrics({key}={shown(metric)}): expected an object with the methods reset, update and compute, such as a "
            "torchmetrics metric, or a function that maps (output, target) to the batch mean"
        )
    return metric if isinstance(metric, Metric) else Average(metric)


def shown(value: Any) -> str:
    """What was given in place of a metric, in an error: data by its class and size, since tensors are long."""
    return described(value) if isinstance(value, Iterable) and not isinstance(value, str) else repr(value)


def copied(item: Any) -> Any:
    """A copy with copies of the tensors."""
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, item)


def plain(value: Any) -> Any:
    """A value with one number as a Python number; any other value unchanged."""
    return value.item() if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0 else value


def is_of_loss(metric: Any) -> TypeGuard[Average]:
    """Whether a metric is the mean of the update's loss, and needs no output."""
    return isinstance(metric, Average) and metric.function is None


def output_and_target(engine: Engine) -> tuple[Any, ...]:
    """The default arguments of metrics."""
    update = engine.state.update
    return update.output_in(update.output), update.target_in(engine.state.batch)
