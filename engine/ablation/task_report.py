"""The report of a study of several tasks: mean scores compared by seed, aggregates with intervals, and each task by itself."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from .aggregate import (
    REPETITIONS,
    bootstrap_interval,
    interquartile_mean,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
)
from .families import Joined, join, joined_table
from .formats import count, listed, without_nan
from .report import Report
from .results import Result
from .rows import Row
from .task_pictures import Profile, draw_aggregates, draw_profiles
from .tasks import Ends, check_scores, ends_in_direction, score

__all__ = ["Aggregate", "Estimate", "TasksReport"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Attributes:
        value: The number, from all runs.
        low: Lower end of the percentile interval of a stratified bootstrap; NaN for a single seed.
        high: Upper end, likewise.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Aggregate:
    """The scores of a variant over all tasks and seeds.

    Attributes:
        variant: Name of the variant.
        interquartile_mean: Mean of the middle half of the scores.
        optimality_gap: By how much scores fall short of 1 on average.
        improvement: Probability that a run scores more than one of the baseline; None for the baseline.
    """

    variant: str
    interquartile_mean: Estimate
    optimality_gap: Estimate
    improvement: Estimate | None


class TasksReport(Report):
    """Report of an ablation study on several tasks (``tasks=``).

    As a `Report`, it compares the mean score over the tasks: within each seed, a variant's runs of all tasks with those of the
    baseline. A seed counts as failed if the run of any task failed. Tests and intervals are those of `Report`. They apply to
    these tasks only.

    ``print`` also shows interquartile mean, optimality gap and probability of improvement, as rliable defines them
    (:mod:`signalfire.ablation.aggregate`), and the comparisons of each task, adjusted over all variants and tasks.

    Args:
        reports: The report of each task, by name, on the same variants and seeds.
        scores: Values of the metric that count as a score of 0 and of 1, by task.
        margin: Largest negligible difference of the mean score.

    Attributes:
        tasks: The report of each task, in the unit of its metric.
        scores: As given.
        by_task: The comparisons of each task, as one family.
        floored: Number of failed runs in the matrices: they count as the lowest score of their task, and at most as 0.

    Raises:
        TypeError, ValueError: if a task has no scores, or the reports have different variants, seeds, metrics or directions.

    Example:
        >>> from signalfire.ablation import Variant
        >>> variants = [Variant("baseline"), Variant("- ema", off=frozenset({"ema"}))]
        >>> def report(chance):
        ...     runs = [Result("baseline", seed, chance + seed / 100) for seed in range(6)]
        ...     runs += [
        ...         Result("- ema", seed, chance - 0.02 + (seed + seed % 2) / 100)
        ...         for seed in range(6)
        ...     ]
        ...     return Report(runs, variants, metric="accuracy", mode="max")
        >>> both = TasksReport(
        ...     {"digits": report(0.7), "wine": report(0.8)},
        ...     {"digits": (0.1, 1.0), "wine": (1 / 3, 1.0)},
        ... )
        >>> print(both.sentences()[0])
        Without ema, score fell by 0.020 (95 % interval 0.013 to 0.026, p = 0.031, 6 seeds): it contributes.
    """

    def __init__(
        self, reports: Mapping[str, Report], scores: Mapping[str, Ends] | Ends, *, margin: float | None = None
    ) -> None:
        first = _alike(reports)
        self.tasks = dict(reports)
        self.scores = check_scores(scores, self.tasks)
        for name, ends in self.scores.items():
            ends_in_direction(name, ends, first.mode)
        self.of_metric = first.metric
        super().__init__(
            self._overall(first),
            [row.variant for row in first.rows],
            metric="score",
            mode="max",
            baseline=first.baseline,
            level=first.level,
            seeds=first.seeds,
            percent=False,
            margin=margin,
        )
        self.by_task: list[Joined] = join(self.tasks)
        self.floored = sum(
            seed in row.failed for task in self.tasks.values() for row in task.rows for seed in self.complete
        )

    @property
    def complete(self) -> tuple[int, ...]:
        """The seeds that all variants ran in all tasks, whether they finished or failed."""
        rows = [row for task in self.tasks.values() for row in task.rows]
        return tuple(seed for seed in self.seeds if all(seed in row.values or seed in row.failed for row in rows))

    def matrix(self, variant: str) -> Floats:
        """The scores of a variant, of shape (seeds, tasks), for the seeds in ``complete``.

        A failed run counts as the lowest score of any variant in its task, and at most as 0.
        """
        if variant not in (names := [row.variant.name for row in self.rows]):
            raise KeyError(
                f"matrix(variant={variant!r}): no variant has this name; the variants are {', '.join(names)}"
            )
        columns = []
        for name, task in self.tasks.items():
            found = {row.variant.name: self._scores_of(name, row) for row in task.rows}
            lowest = min((one for values in found.values() for one in values.values()), default=0.0)
            columns.append([found[variant].get(seed, min(lowest, 0.0)) for seed in self.complete])
        return np.array(columns, dtype=np.float64).T.reshape(len(self.complete), len(self.tasks))

    @cached_property
    def aggregates(self) -> tuple[Aggregate, ...]:
        """Interquartile mean, optimality gap and probability of improvement of each variant; empty without a complete seed.

        The intervals are percentiles of 2,000 resamples. They ignore that runs are paired by seed, so two of them may overlap
        even if the difference, which the tests examine, is certain.
        """
        if not self.complete:
            return ()
        baseline = self.matrix(self.baseline)

        def estimate(statistic: Callable[..., Floats], *scores: Floats) -> Estimate:
            low, high = self._interval(statistic, *scores)
            return Estimate(float(statistic(*scores)), float(low), float(high))

        found = []
        for row in self.rows:
            name, own = row.variant.name, self.matrix(row.variant.name)
            better = None if name == self.baseline else estimate(probability_of_improvement, own, baseline)
            found.append(Aggregate(name, estimate(interquartile_mean, own), estimate(optimality_gap, own), better))
        return tuple(found)

    def profiles(self, taus: Sequence[float] | None = None) -> dict[str, Profile]:
        """The performance profile of each variant: the share of its runs that score more than each threshold.

        Args:
            taus: The thresholds; by default 101 from the lowest to the highest score.

        Returns:
            By variant: thresholds, shares, and the lower and upper ends of their pointwise intervals.
        """
        if not self.complete:
            return {}
        matrices = {row.variant.name: self.matrix(row.variant.name) for row in self.rows}
        every = np.stack(list(matrices.values()))
        chosen = np.linspace(every.min(), every.max(), 101) if taus is None else np.asarray(taus, dtype=np.float64)

        def profile(scores: Floats) -> Floats:
            return performance_profile(scores, chosen)

        return {name: Profile(chosen, profile(own), *self._interval(profile, own)) for name, own in matrices.items()}

    def _interval(self, statistic: Callable[..., Floats], *scores: Floats) -> Floats:
        """The percentile interval; NaN for a single seed, of which all resamples are equal: no width would claim certainty."""
        found = bootstrap_interval(statistic, *scores, level=self.level)
        return found if len(self.complete) > 1 else np.full_like(found, np.nan)

    def plot_profiles(self, path: str | PathLike[str] | TextIO, format: str | None = None) -> None:
        """Plot the performance profile of each variant in a panel, with that of the baseline in gray.

        Args:
            path: File to write, or an open one.
            format: The format, such as "svg"; by default that of the extension: .png, .pdf or .svg.
        """
        draw_profiles(self.profiles(), path, baseline=self.baseline, level=self.level, format=format)

    def plot_aggregates(self, path: str | PathLike[str] | TextIO, format: str | None = None) -> None:
        """Plot interquartile mean, optimality gap and probability of improvement of each variant with their intervals.

        Args:
            path: File to write, or an open one.
            format: The format, as for `plot_profiles`.
        """
        found = {
            one.variant: [
                None if part is None else (part.value, part.low, part.high)
                for part in (one.interquartile_mean, one.optimality_gap, one.improvement)
            ]
            for one in self.aggregates
        }
        draw_aggregates(found, path, baseline=self.baseline, level=self.level, format=format)

    def sentences(self) -> list[str]:
        """The findings in words: on the mean score, and on each task whose comparison shows something."""
        shown = []
        for one in self.by_task:
            comparison, end = one.row.comparison, one.conclusion
            if end.verdict == "undecided" or comparison is None or one.row.failures is not None:
                continue
            amount = f"{comparison.mean:.3g}"
            shown.append(
                f'In {one.name}, "{one.variant}" is {end.verdict}: {self.of_metric} changes by {amount} (p = {one.adjusted:.2g} '
                f"adjusted for {count(len(self.by_task), 'comparison')})."
            )
        return super().sentences() + shown

    def warnings(self) -> list[str]:
        """Limits of the conclusions: failed and missing runs, and too few seeds."""
        found = super().warnings()
        if left_out := [str(seed) for seed in self.seeds if seed not in self.complete]:
            found.append(
                "Aggregates and profiles omit these seeds, because not all variants and tasks ran with them: "
                f"{listed(left_out)}."
            )
        if self.floored:
            found.append(
                f"{count(self.floored, 'failed run')} count{'s' if self.floored == 1 else ''} in aggregates and "
                "profiles as the lowest score of the task, but never as more than 0."
            )
        return found

    def methods(self) -> str:
        """One paragraph for a paper: the comparison, its seeds and tasks, and the statistical tests."""
        ends = "; ".join(f"{name}: {zero:.4g} and {one:.4g}" for name, (zero, one) in self.scores.items())
        return (
            f"{super().methods()} A run is one training on each of {len(self.tasks)} tasks ({', '.join(self.tasks)}), "
            f"and its score is the mean of {self.of_metric} over the tasks, scaled linearly so that these values count "
            f"as 0 and 1: {ends}. Interquartile means, optimality gaps, performance profiles and probabilities of "
            f"improvement (Agarwal et al., 2021) have {100 * self.level:g} % percentile intervals from "
            f"{REPETITIONS:,} stratified bootstrap resamples."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report, as JSON types; None for missing numbers."""
        found: dict[str, Any] = {
            "scores": {name: list(ends) for name, ends in self.scores.items()},
            "aggregates": [asdict(one) for one in self.aggregates],
            "by_task": [
                {"task": one.name, "variant": one.variant, "adjusted": one.adjusted, **asdict(one.conclusion)}
                for one in self.by_task
            ],
            "tasks": {name: task.to_dict() for name, task in self.tasks.items()},
        }
        content: dict[str, Any] = super().to_dict() | without_nan(found)
        return content

    def _further_tables(self) -> list[list[list[str]]]:
        return [
            *([self._aggregate_table()] if self.aggregates else []),
            joined_table(self.by_task, "task", self.level),
        ]

    def _further_pictures(self) -> list[tuple[str, str]]:
        found = []
        for title, plot in (("Aggregates", self.plot_aggregates), ("Performance profiles", self.plot_profiles)):
            picture = io.StringIO()
            if self.complete:
                plot(picture, format="svg")
                found.append((title, picture.getvalue()))
        return found

    def _aggregate_table(self) -> list[list[str]]:
        lines = [["variant", "interquartile mean", "optimality gap", "P(better than baseline)"]]
        for one in self.aggregates:
            parts = (one.interquartile_mean, one.optimality_gap, one.improvement)
            lines.append([one.variant, *(_text(part) for part in parts)])
        return lines

    def _legend(self, *, brief: bool = False) -> list[str]:
        ends = ", ".join(f"{name} {zero:.3g} and {one:.3g}" for name, (zero, one) in self.scores.items())
        seeds, tasks = len(self.complete), len(self.tasks)
        return [
            *super()._legend(brief=brief),
            f"score: mean over {tasks} tasks of {self.of_metric}, where these values count as 0 and 1: {ends}. Seconds and steps "
            "are totals over all tasks.",
            f"Aggregates: over {seeds} x {tasks} scores; [{100 * self.level:g} % percentile intervals] from "
            f"{REPETITIONS:,} stratified bootstrap resamples. These intervals are not adjusted, are too narrow with "
            f"few seeds, and do not affect any verdict. Tasks: in the unit of {self.of_metric}; intervals and adjusted "
            f"p: jointly over {count(len(self.by_task), 'comparison')}.",
        ]

    def _scores_of(self, task: str, row: Row) -> dict[int, float]:
        return {seed: float(score(value, self.scores[task])) for seed, value in row.values.items()}

    def _overall(self, first: Report) -> list[Result]:
        """One result for each variant and seed of which all tasks ran: the mean score, and the costs of all tasks together."""
        found = []
        costs = {(name, one.variant, one.seed): one for name, task in self.tasks.items() for one in task.results}
        rows = {(name, row.variant.name): row for name, task in self.tasks.items() for row in task.rows}
        for row in first.rows:
            variant = row.variant.name
            of_tasks = {name: rows[name, variant] for name in self.tasks}
            for seed in first.seeds:
                if all(seed in one.failed or seed in one.values for one in of_tasks.values()):
                    runs = [costs[name, variant, seed] for name in self.tasks]
                    found.append(self._joined(variant, seed, of_tasks, runs))
        return found

    def _joined(self, variant: str, seed: int, of_tasks: Mapping[str, Row], runs: Sequence[Result]) -> Result:
        """The result of the runs of all tasks with a seed, which failed if one of them did."""
        failed = [f"{name}: {one.failed[seed]}" for name, one in of_tasks.items() if seed in one.failed]
        finished = {} if failed else of_tasks
        scores = {name: score(one.values[seed], self.scores[name]) for name, one in finished.items()}
        return Result(
            variant,
            seed,
            float(sum(scores.values()) / len(scores)) if scores else None,
            {f"score_{name}": float(one) for name, one in scores.items()},
            sum(run.steps for run in runs),
            math.fsum(run.seconds for run in runs),
            max(run.memory for run in runs),
            "; ".join(failed) or None,
        )


def _text(part: Estimate | None) -> str:
    if part is None or math.isnan(part.low):
        return "-" if part is None else f"{part.value:.3f}"
    return f"{part.value:.3f} [{part.low:.3f}, {part.high:.3f}]"


def _alike(reports: Mapping[str, Report]) -> Report:
    """The first of the reports; an error if others are about other runs."""
    if len(reports) < 2:
        raise ValueError(f"TasksReport(reports=...): got {len(reports)} tasks; expected two or more")
    (name, first), *others = reports.items()
    for other, one in others:
        for what, mine, theirs in (
            ("variants", [row.variant.name for row in first.rows], [row.variant.name for row in one.rows]),
            ("seeds", first.seeds, one.seeds),
            ("metrics", first.metric, one.metric),
            ("directions", first.mode, one.mode),
            ("baselines", first.baseline, one.baseline),
            ("levels", first.level, one.level),
        ):
            if mine != theirs:
                raise ValueError(f"TasksReport: {name!r} and {other!r} have different {what}: {mine} and {theirs}")
    return first
