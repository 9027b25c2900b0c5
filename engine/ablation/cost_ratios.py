"""What the variants of a study cost, beside the baseline: time, memory and steps, as ratios with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .formats import aligned
from .results import BASELINE, Result
from .statistics import compare

__all__ = ["COSTS", "Cost", "cost_table", "costs"]

What = Literal["seconds", "memory", "steps"]
COSTS: tuple[What, ...] = ("seconds", "memory", "steps")


@dataclass(frozen=True)
class Cost:
    """How many times as much a variant takes as the baseline.

    Attributes:
        variant: Name of the variant.
        what: "seconds" (wall-clock time), "memory" (peak of the process) or "steps" (of the optimizer).
        ratio: Geometric mean of the ratios within each seed; NaN without any.
        low: Lower end of its interval, that of Student's t for the logarithms; NaN for fewer than two ratios, and if all are
            equal.
        high: Upper end of the interval, likewise.
        n: Number of ratios: seeds that both finished.
    """

    variant: str
    what: What
    ratio: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if math.isnan(self.ratio):
            return "-"
        interval = "" if math.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.ratio:.2f}{interval}"


def costs(results: Sequence[Result], *, baseline: str = BASELINE, level: float = 0.95) -> list[Cost]:
    """The costs of each variant except the baseline, as ratios to it.

    Runs of one seed are compared. Times are comparable if the runs were made on one kind of machine, as many at a time; failed
    runs do not count, as they may have ended early.

    Args:
        results: Results of the runs, such as ``study.results(plan)``.
        baseline: Name of the variant to compare with.
        level: Confidence level of the intervals.

    Raises:
        ValueError: if there is no run of the baseline.

    Example:
        >>> runs = [Result("baseline", s, 1.0, seconds=2.0 + s, steps=10) for s in range(3)]
        >>> runs += [Result("- ema", s, 1.0, seconds=1.0 + 0.4 * s, steps=10) for s in range(3)]
        >>> print(*costs(runs))
        0.47 [0.41, 0.54] - 1.00
    """
    finished = {(one.variant, one.seed): one for one in results if one.error is None and one.value is not None}
    names = list(dict.fromkeys(one.variant for one in results))
    if baseline not in names:
        raise ValueError(
            f"costs(baseline={baseline!r}): this variant has no runs; available variants: {', '.join(names) or 'none'}"
        )
    found = []
    for name in names:
        if name != baseline:
            pairs = _pairs(finished, name, baseline)
            found += [_cost(name, what, pairs, level) for what in COSTS]
    return found


def _pairs(finished: Mapping[tuple[str, int], Result], name: str, baseline: str) -> list[tuple[Result, Result]]:
    """The runs of a variant and of the baseline with the same seed."""
    seeds = sorted({seed for variant, seed in finished if variant == name and (baseline, seed) in finished})
    return [(finished[name, seed], finished[baseline, seed]) for seed in seeds]


def _cost(variant: str, what: What, pairs: Sequence[tuple[Result, Result]], level: float) -> Cost:
    """One cost of a variant, from its runs and those of the baseline."""
    costs = [(getattr(own, what), getattr(other, what)) for own, other in pairs]
    logs = [math.log(own) - math.log(other) for own, other in costs if own > 0 and other > 0]
    one = compare(logs, level=level)
    return Cost(variant, what, math.exp(one.mean), math.exp(one.low), math.exp(one.high), one.n)


def cost_table(found: Sequence[Cost]) -> str:
    """The costs as a table: one row per variant, the ratios with their intervals."""
    lines = [["times the baseline", *COSTS]]
    for name in dict.fromkeys(one.variant for one in found):
        by_kind = {one.what: str(one) for one in found if one.variant == name}
        lines.append([name, *(by_kind.get(what, "-") for what in COSTS)])
    return aligned(lines)
