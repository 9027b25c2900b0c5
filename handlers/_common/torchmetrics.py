"""Helpers for torchmetrics metrics, beyond `reset`, `update` and `compute`: their states, and the ranks they merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from signalfire.distributed import Processes, SameData
from signalfire.distributed.shards import VirtualShards

__all__ = ["keeps_inputs", "load_state_of", "merge", "merging_nothing", "state_of", "synced", "torchmetrics_in"]


@contextmanager
def synced(metric: Any, data: Processes) -> Iterator[None]:
    """Let torchmetrics merge the states of these ranks: of none if each has seen all samples, or if `merge` was called."""
    if isinstance(data, SameData | VirtualShards):
        with merging_nothing(metric):
            yield
        return
    own = data.main is not None
    grouped = [part for part in torchmetrics_in(metric).values() if part.process_group is None] if own else []
    for part in grouped:
        part.process_group = data.main
    try:
        yield
    finally:
        for part in grouped:
            part.process_group = None


@contextmanager
def merging_nothing(metric: Any) -> Iterator[None]:
    """Let a metric compute from this rank's state alone."""
    parts = [part for part in torchmetrics_in(metric).values() if getattr(part, "_to_sync", False)]
    for part in parts:
        part._to_sync = False
    try:
        yield
    finally:
        for part in parts:
            part._to_sync = True
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                part._computed = None  # otherwise it would be reused as the synchronized value


def torchmetrics_in(metric: Any) -> dict[str, Any]:
    """A torchmetrics metric and those inside it (in a collection or wrapper), by path."""
    if not isinstance(metric, torch.nn.Module):
        return {}
    return {path: part for path, part in metric.named_modules() if hasattr(part, "_update_count")}


def keeps_inputs(metric: Any) -> bool:
    """Whether a torchmetrics metric has states that are lists, which keep what it is updated with until it is computed."""
    parts = torchmetrics_in(metric).values()
    return any(isinstance(default, list) for part in parts for default in getattr(part, "_defaults", {}).values())


def _own_values(metric: Any) -> dict[str, Any]:
    """The state that a wrapper (MinMaxMetric, Running) keeps in plain attributes."""
    omitted = {"_computed", "_forward_cache", "_update_count", *metric.metric_state}
    return {k: v for k, v in vars(metric).items() if k not in omitted and isinstance(v, int | float | Tensor)}


def state_of(metric: Any) -> dict[str, Any]:
    """The state of any metric: the whole one of torchmetrics, else what its `state_dict` returns, if it has one."""
    # torchmetrics' own state_dict contains only states marked as persistent.
    if parts := torchmetrics_in(metric):
        return {
            path: {"state": dict(m.metric_state), "count": m._update_count, "own": _own_values(m)}
            for path, m in parts.items()
        }
    return metric.state_dict() if hasattr(metric, "state_dict") else {}


def load_state_of(metric: Any, state: Mapping[str, Any]) -> None:
    """Load what `state_of` returned."""
    if parts := torchmetrics_in(metric):
        metric.reset()
        for path, part in parts.items():
            for key, value in state[path]["state"].items():
                setattr(part, key, value)
            part._update_count = state[path]["count"]
            vars(part).update(state[path].get("own", {}))
    elif hasattr(metric, "load_state_dict"):
        metric.load_state_dict(state)


def merge(metric: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Load the union of what `state_of` returned, in this order.

    Raises:
        ValueError: for a wrapper of torchmetrics that keeps values which nothing merges.
    """
    parts = torchmetrics_in(metric)
    if not parts:
        metric.merge(list(states))
        return
    metric.reset()
    for path, part in parts.items():
        several = [state[path] for state in states if state[path]["count"]]
        if any(not _same(one["own"], _own_values(part)) for one in several):
            raise ValueError(
                f"{type(part).__name__} keeps values outside its metric states, but only metric states can be merged "
                "across shards; use this metric only in runs without shards"
            )
        for key, reduce in part._reductions.items() if several else ():
            setattr(part, key, _reduced([one["state"][key] for one in several], reduce))
        part._update_count = sum(one["count"] for one in several)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the values that a metric keeps in attributes are equal."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key]
        for key, value in one.items()
    )


def _reduced(values: list[Any], reduce: Any) -> Any:
    """The values of one state of several metrics as one, as torchmetrics reduces those of several ranks."""
    together = [item for value in values for item in value] if isinstance(values[0], list) else torch.stack(values)
    return together if reduce is None or len(together) == 0 else reduce(together)
