"""The results of each variant, compared with the baseline."""

from __future__ import annotations

import math
import re
import statistics as plain
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from .results import Result, Variant
from .statistics import Comparison, compare, exact, holm

__all__ = ["Findings", "Row", "make_rows"]

_ERROR = re.compile(r"[A-Za-z_][\w.]*(:|$)")


@dataclass(frozen=True)
class Row:
    """The runs of one variant, summarized.

    Attributes:
        variant: The variant.
        values: Metric of each finished run, by seed.
        planned: Number of planned runs.
        failed: Reason why each failed run failed, by seed. A run whose metric is infinite or NaN also counts as failed.
        missing: Seeds without a run.
        differences: Difference to the baseline, by seed, where both runs finished.
        mean: Mean of the metric over the finished runs; NaN without any.
        sd: Standard deviation of the metric over the seeds; NaN for fewer than two.
        comparison: Statistics of the differences; None for the baseline itself.
        adjusted: p-value after Holm's correction over all variants except the baseline; None for the baseline itself.
        seconds: Mean duration of the finished runs; NaN without any.
        steps: Mean number of optimizer steps of the finished runs; NaN without any.
        memory: Maximum peak memory of the finished runs, in bytes; 0 if unknown.
    """

    variant: Variant
    values: Mapping[int, float]
    planned: int
    failed: Mapping[int, str]
    missing: tuple[int, ...]
    differences: Mapping[int, float]
    mean: float
    sd: float
    comparison: Comparison | None
    adjusted: float | None
    seconds: float
    steps: float
    memory: int

    @property
    def finished(self) -> int:
        """Number of finished runs."""
        return len(self.values)

    @property
    def without_pair(self) -> tuple[int, ...]:
        """Seeds that finished in this variant, but not in the baseline."""
        return () if self.comparison is None else tuple(seed for seed in self.values if seed not in self.differences)


class Findings(Protocol):
    """The part of a report that its sentences and its plot read; see `Report` for the attributes."""

    metric: str
    mode: Literal["min", "max"]
    baseline: str
    level: float
    seeds: tuple[int, ...]
    rows: list[Row]
    percent: bool
    needed: int | None
    digits: int | None

    @property
    def alpha(self) -> float: ...

    @property
    def comparisons(self) -> int: ...


def make_rows(
    results: Sequence[Result],
    variants: Sequence[Variant],
    *,
    metric: str,
    baseline: str,
    seeds: Sequence[int],
    level: float,
) -> list[Row]:
    """One row per variant, the baseline first; the arguments are those of `Report`."""
    found = _by_run(results, variants, baseline, seeds)
    ordered = sorted(variants, key=lambda variant: variant.name != baseline)  # the others keep their order
    values = {variant.name: _values(variant.name, found, seeds) for variant in ordered}
    differences = {
        variant.name: {
            seed: exact(value) - exact(values[baseline][seed])
            for seed, value in values[variant.name].items()
            if seed in values[baseline]
        }
        for variant in ordered[1:]
    }
    compared = {name: compare(list(those.values()), level=level) for name, those in differences.items()}
    adjusted = dict(zip(compared, holm([comparison.p for comparison in compared.values()]), strict=True))
    rows = []
    for variant in ordered:
        runs = [(seed, found.get((variant.name, seed))) for seed in seeds]
        own = values[variant.name]
        finished = [run for seed, run in runs if run is not None and seed in own]
        rows.append(
            Row(
                variant=variant,
                values=own,
                planned=len(runs),
                failed={seed: _reason(run, metric) for seed, run in runs if run is not None and seed not in own},
                missing=tuple(seed for seed, run in runs if run is None),
                differences={seed: float(one) for seed, one in differences.get(variant.name, {}).items()},
                mean=plain.fmean(own.values()) if own else math.nan,
                sd=plain.stdev(own.values()) if len(own) > 1 else math.nan,
                comparison=compared.get(variant.name),
                adjusted=adjusted.get(variant.name),
                seconds=plain.fmean(run.seconds for run in finished) if finished else math.nan,
                steps=plain.fmean(run.steps for run in finished) if finished else math.nan,
                memory=max((run.memory for run in finished), default=0),
            )
        )
    return rows


def _by_run(
    results: Sequence[Result], variants: Sequence[Variant], baseline: str, seeds: Sequence[int]
) -> dict[tuple[str, int], Result]:
    """The results by variant and seed; an error if one has an unknown variant or seed, or a duplicate."""
    names = [variant.name for variant in variants]
    if baseline not in names:
        raise ValueError(f"Report(baseline={baseline!r}): no such variant; there are: {names}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Report(variants=...): two variants have the same name: {twice}")
    found: dict[tuple[str, int], Result] = {}
    for result in results:
        run = f"Report(results=...): there is a run of variant {result.variant!r} with seed {result.seed}"
        if result.variant not in names:
            raise ValueError(f"{run}, which is not one of the variants: {names}")
        if result.seed not in seeds:
            raise ValueError(f"{run}, which is not one of the seeds: {list(seeds)}")
        if (result.variant, result.seed) in found:
            raise ValueError(f"{run} more than once; pass one of them")
        found[result.variant, result.seed] = result
    return found


def _values(name: str, found: Mapping[tuple[str, int], Result], seeds: Sequence[int]) -> dict[int, float]:
    """The metric of each finished run of a variant, by seed."""
    values = {}
    for seed in seeds:
        result = found.get((name, seed))
        if result and result.error is None and result.value is not None and math.isfinite(result.value):
            values[seed] = float(result.value)
    return values


def _reason(result: Result, metric: str) -> str:
    """The reason why a run counts as failed, in one line."""
    if result.error is None:
        return f"{metric} is {result.value}"
    lines = result.error.strip().splitlines()
    # The error is the last line of the traceback that is neither indented nor a note.
    return next((line.strip() for line in reversed(lines) if _ERROR.match(line)), lines[-1].strip() if lines else "")
