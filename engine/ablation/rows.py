"""The results of each variant, compared with the baseline."""

from __future__ import annotations

import re
import statistics as plain
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, Protocol

from .failures import Failures, failures_of, signed_ranks
from .joint import intervals, step_down
from .looks import Looks, Sequential
from .pruning import Pruned, adjusted_with_pruned
from .results import BASELINE, Result, Variant, finished_value
from .statistics import Comparison, compare, exact, finished_values, mean_of, sd_of
from .verdicts import Conclusion, Verdict, conclude, conclude_failures

__all__ = ["Findings", "Row", "Runs", "make_rows", "sequence", "spread"]

_ERROR = re.compile(r"[A-Za-z_][\w.]*(:|$)")


@dataclass(frozen=True, kw_only=True)
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
        comparison: Statistics of the differences; None for the baseline itself. If any run of a pair failed, they are conditional
            on finishing, and neither p nor the verdict rests on them.
        failures: In how many pairs which run failed; None if none did.
        p: p-value of the sign-flip test of the differences, or, if any run of a pair failed, of the signed ranks of all pairs;
            None for the baseline itself.
        adjusted: p-value of the step-down test over all variants except the baseline, likewise. With planned looks it is alpha
            for a variant that a look found to differ, and 1 for the others.
        conclusion: The verdict and its simultaneous interval; None for the baseline itself.
        look: With planned looks, the number of seeds at the look that decided, or else at the last one; None without.
        seconds: Mean duration of the finished runs; NaN without any.
        steps: Mean number of optimizer steps of the finished runs; NaN without any.
        memory: Maximum peak memory of the finished runs, in bytes; 0 if unknown.
    """

    variant: Variant
    values: Mapping[int, float]
    planned: int
    failed: Mapping[int, str]
    missing: tuple[int, ...]
    differences: Mapping[int, float] = field(default_factory=dict)
    mean: float
    sd: float
    comparison: Comparison | None = None
    failures: Failures | None = None
    p: float | None = None
    adjusted: float | None = None
    conclusion: Conclusion | None = None
    look: int | None = None
    seconds: float
    steps: float
    memory: int

    @property
    def verdict(self) -> Verdict | None:
        """Whether the variant is "equivalent" to the baseline, "better", "worse", or it is "undecided"."""
        return None if self.conclusion is None else self.conclusion.verdict

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
    margin: float | None
    looks: Looks | None
    seen: tuple[int, ...]
    pruned: tuple[Pruned, ...]
    facts: tuple[str, ...]
    limits: tuple[str, ...]

    @property
    def alpha(self) -> float: ...

    @property
    def comparisons(self) -> int: ...


class Runs:
    """The runs of a study, as values by variant and seed: None for a failed run.

    Raises:
        ValueError: if a result has an unknown variant or seed, or a duplicate.
    """

    def __init__(
        self,
        results: Sequence[Result],
        variants: Sequence[Variant],
        baseline: str,
        seeds: Sequence[int],
        mode: Literal["min", "max"],
    ) -> None:
        self.found = _by_run(results, variants, baseline, seeds)
        self.variants, self.baseline, self.seeds, self.mode = variants, baseline, seeds, mode
        self.names = tuple(variant.name for variant in variants if variant.name != baseline)

    def outcomes(self, name: str, seeds: Sequence[int]) -> dict[int, Fraction | None]:
        """The value of each run of a variant, None for a failed one."""
        runs = ((seed, self.found.get((name, seed))) for seed in seeds)
        return {seed: _number(run) for seed, run in runs if run is not None}

    def differences(self, name: str, seeds: Sequence[int]) -> dict[int, Fraction]:
        """The difference of each pair of finished runs."""
        baseline = self.outcomes(self.baseline, seeds)
        return {
            seed: value - other
            for seed, value in self.outcomes(name, seeds).items()
            if value is not None and (other := baseline.get(seed)) is not None
        }

    def failures(self, name: str, seeds: Sequence[int]) -> Failures | None:
        return failures_of(self.outcomes(name, seeds), self.outcomes(self.baseline, seeds))

    def scores(self, name: str, seeds: Sequence[int]) -> dict[int, Fraction]:
        """What is tested: the differences, or the signed ranks of all pairs if a run of one failed."""
        if self.failures(name, seeds) is None:
            return self.differences(name, seeds)
        return signed_ranks(self.outcomes(name, seeds), self.outcomes(self.baseline, seeds), self.mode)


@dataclass(frozen=True)
class _Tested:
    """What the family's tests say of one variant.

    Attributes:
        seeds: The seeds that count.
        rejected: Whether the variant is found to differ.
        adjusted: Its adjusted p-value.
        interval: Its simultaneous interval.
        look: As in `Row`.
    """

    seeds: Sequence[int]
    rejected: bool
    adjusted: float
    interval: tuple[float, float]
    look: int | None


def make_rows(
    runs: Runs, metric: str, level: float, *, margin: float | None = None, looks: Looks | None = None, pruned: int = 0
) -> list[Row]:
    """One row per variant, the baseline first; ``pruned`` is a number of variants, the others are arguments of `Report`."""
    tested = _tested(runs, level, pruned) if looks is None else _tested_at_looks(runs, sequence(runs, looks), looks)
    most = max((len(one.seeds) for one in tested.values()), default=len(runs.seeds))
    ordered = sorted(runs.variants, key=lambda variant: variant.name != runs.baseline)  # the others keep their order
    rows = []
    for variant in ordered:
        own = tested.get(variant.name)
        row = _row(variant, runs, runs.seeds[:most] if own is None else own.seeds, metric)
        rows.append(row if own is None else _compared(row, runs, own, level, margin))
    return rows


def spread(results: Sequence[Result], baseline: str = BASELINE) -> float | None:
    """The standard deviation of the paired differences, as the median over the variants; None with fewer than two pairs each."""
    values = finished_values(results)
    found = []
    for name in {result.variant: None for result in results if result.variant != baseline}:
        own = {seed: value for (variant, seed), value in values.items() if variant == name}
        differences = [value - values[baseline, seed] for seed, value in own.items() if (baseline, seed) in values]
        if len(differences) > 1:
            found.append(float(plain.stdev(differences)))
    return plain.median(found) if found else None


def sequence(runs: Runs, looks: Looks) -> Sequential:
    """The looks of which all runs are there."""
    found = Sequential(looks, runs.names)
    while (size := found.next) is not None:
        there = runs.seeds[:size]
        if any((name, seed) not in runs.found for name in (runs.baseline, *found.undecided) for seed in there):
            break
        found.look({name: runs.scores(name, there) for name in found.undecided}, there)
    return found


def _tested(runs: Runs, level: float, pruned: int) -> dict[str, _Tested]:
    scores = [runs.scores(name, runs.seeds) for name in runs.names]
    differences = [runs.differences(name, runs.seeds) for name in runs.names]
    adjusted, between = adjusted_with_pruned(scores, differences, pruned, level)
    alpha = round(1 - level, 12)
    return {
        name: _Tested(runs.seeds, p <= alpha, p, interval, None)
        for name, p, interval in zip(runs.names, adjusted, between, strict=True)
    }


def _tested_at_looks(runs: Runs, found: Sequential, looks: Looks) -> dict[str, _Tested]:
    """The tests at the look that decided on each variant, or at the last one; with intervals that hold at all looks together."""
    tested = {}
    left = list(runs.names)
    for size in found.made or looks.sizes[:1]:
        there = runs.seeds[:size]
        between = intervals([runs.differences(name, there) for name in left], 1 - looks.added(size))
        for name, interval in zip(left, between, strict=True):
            rejected = found.decided.get(name) == size
            tested[name] = _Tested(
                there, rejected, looks.alpha if rejected else 1.0, interval, size if found.made else None
            )
        left = [name for name in left if not tested[name].rejected]
    return tested


def _row(variant: Variant, runs: Runs, seeds: Sequence[int], metric: str) -> Row:
    """The runs of a variant, without a comparison."""
    found = {seed: runs.found[variant.name, seed] for seed in seeds if (variant.name, seed) in runs.found}
    outcomes = runs.outcomes(variant.name, seeds)
    values = {seed: float(number) for seed, number in outcomes.items() if number is not None}
    finished = [found[seed] for seed in values]
    return Row(
        variant=variant,
        values=values,
        planned=len(seeds),
        failed={seed: _reason(run, metric) for seed, run in found.items() if seed not in values},
        missing=tuple(seed for seed in seeds if seed not in found),
        mean=mean_of(values.values()),
        sd=sd_of(values.values()),
        seconds=mean_of([run.seconds for run in finished]),
        steps=mean_of([run.steps for run in finished]),
        memory=max((run.memory for run in finished), default=0),
    )


def _compared(row: Row, runs: Runs, tested: _Tested, level: float, margin: float | None) -> Row:
    """The row with the comparison of its variant with the baseline."""
    name, seeds = row.variant.name, tested.seeds
    differences = runs.differences(name, seeds)
    comparison = compare(list(differences.values()), level=level)
    failures = runs.failures(name, seeds)
    if failures is None:
        p = comparison.p
        conclusion = conclude(tested.interval, comparison.mean, tested.rejected, mode=runs.mode, margin=margin)
    else:
        ranks = runs.scores(name, seeds)
        p = step_down([ranks])[0]
        conclusion = conclude_failures(float(sum(ranks.values())), tested.rejected, failures, mode=runs.mode)
    return replace(
        row,
        differences={seed: float(one) for seed, one in differences.items()},
        comparison=comparison,
        failures=failures,
        p=p,
        adjusted=tested.adjusted,
        conclusion=conclusion,
        look=tested.look,
    )


def _by_run(
    results: Sequence[Result], variants: Sequence[Variant], baseline: str, seeds: Sequence[int]
) -> dict[tuple[str, int], Result]:
    """The results by variant and seed; an error if one has an unknown variant or seed, or a duplicate."""
    names = [variant.name for variant in variants]
    if baseline not in names:
        raise ValueError(f"Report(baseline={baseline!r}): no variant has this name; the variants are {names}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Report(variants=...): several variants have the same name: {twice}")
    found: dict[tuple[str, int], Result] = {}
    for result in results:
        run = f"Report(results=...): a run has variant {result.variant!r} and seed {result.seed}"
        if result.variant not in names:
            raise ValueError(f"{run}, but the only variants are {names}")
        if result.seed not in seeds:
            raise ValueError(f"{run}, but the only seeds are {list(seeds)}")
        if (result.variant, result.seed) in found:
            raise ValueError(f"{run}, the same as an earlier run; pass only one of the two runs")
        found[result.variant, result.seed] = result
    return found


def _number(run: Result) -> Fraction | None:
    """The metric of a run; None if the run failed."""
    value = finished_value(run)
    return None if value is None else exact(value)


def _reason(result: Result, metric: str) -> str:
    """The reason why a run counts as failed, in one line."""
    if result.error is None:
        return f"{metric} is {result.value}"
    lines = result.error.strip().splitlines()
    # The error is the last line of the traceback that is neither indented nor a note.
    return next((line.strip() for line in reversed(lines) if _ERROR.match(line)), lines[-1].strip() if lines else "")
