"""Variants of a composition, and the result of each run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Result", "Variant", "finished_value"]

BASELINE = "baseline"
MOST_POINTS = 200
"""Of a history with more points every second one is dropped."""


@dataclass(frozen=True)
class Variant:
    """A composition with some handlers switched off or replaced.

    Attributes:
        name: Name of the variant, such as "baseline", "- ema" or "mixup = cutmix".
        off: Names of the handlers that are switched off.
        swapped: Pairs (handler, alternative) of names: the alternative replaces the handler.
        level: In factorial designs, pairs of a factor's name and whether it is on, or the name of its level.
        arguments: Pairs of an argument of ``build`` and its value.
    """

    name: str
    off: frozenset[str] = frozenset()
    swapped: tuple[tuple[str, str], ...] = ()
    level: tuple[tuple[str, bool | str], ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Result:
    """The result of one run, stored as one line.

    Attributes:
        variant: Name of the variant.
        seed: Seed of the run.
        value: Last value of the metric; None if the run failed.
        metrics: All scalar metrics at the end of the run.
        steps: Number of optimizer steps.
        seconds: Wall-clock time of the run.
        memory: Peak memory of the process, in bytes.
        error: Traceback if the run failed.
        history: For each metric, pairs of an epoch and the value at its end; at most 200, evenly spread.
    """

    variant: str
    seed: int
    value: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    memory: int = 0
    error: str | None = None
    history: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)


def finished_value(result: Result) -> float | None:
    """The metric of a run; None if the run failed, or its metric is infinite or NaN."""
    if result.error is not None or result.value is None:
        return None
    return result.value if math.isfinite(result.value) else None
