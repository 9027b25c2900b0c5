"""Comparisons of several reports on the same seeds as one family of tests: of several tasks, or of several metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .failures import signed_ranks
from .formats import p_text
from .pruning import adjusted_with_pruned
from .rows import Findings, Row
from .statistics import exact
from .verdicts import Conclusion, conclude, conclude_failures

__all__ = ["Joined", "join", "joined_table"]


@dataclass(frozen=True)
class Joined:
    """The comparison of one variant with the baseline in one of several reports.

    Attributes:
        name: Name of the report: the task, or the metric.
        row: The variant's row in this report; its own p-values and interval know nothing of the other reports.
        adjusted: p-value of the step-down test over all comparisons of the family.
        conclusion: The verdict, and its simultaneous interval over the family.
    """

    name: str
    row: Row
    adjusted: float
    conclusion: Conclusion

    @property
    def variant(self) -> str:
        """Name of the variant."""
        return self.row.variant.name


def join(reports: Mapping[str, Findings]) -> list[Joined]:
    """The comparisons of all reports as one family.

    Swapping the labels of the runs of one seed swaps them in all tasks and all metrics, so that the joint distribution of sign
    flips (:mod:`signalfire.ablation.joint`) covers all of them, however they depend on each other.

    Variants that were pruned count in the family of each report, with p = 1, and p-values are then adjusted by Holm's procedure
    (:mod:`signalfire.ablation.pruning`).

    Args:
        reports: The reports by name; all have the same seeds and level.
    """
    places = [(name, one, row) for name, one in reports.items() for row in one.rows if row.comparison is not None]
    tested = [_scores(one, row) for _, one, row in places]
    level = next(iter(reports.values())).level
    differences = [_differences(one, row) for _, one, row in places]
    pruned = sum(len(one.pruned) for one in reports.values())
    adjusted, between = adjusted_with_pruned(tested, differences, pruned, level)
    alpha = round(1 - level, 12)
    found = []
    for (name, one, row), ranks, p, interval in zip(places, tested, adjusted, between, strict=True):
        if row.failures is None:
            mean = row.comparison.mean if row.comparison else 0.0
            conclusion = conclude(interval, mean, p <= alpha, mode=one.mode, margin=one.margin)
        else:
            conclusion = conclude_failures(float(sum(ranks.values())), p <= alpha, row.failures, mode=one.mode)
        found.append(Joined(name, row, p, conclusion))
    return found


def joined_table(found: Sequence[Joined], what: str, level: float) -> list[list[str]]:
    """The header and one line for each comparison, with three significant digits, as their units differ.

    Args:
        found: The comparisons.
        what: What the reports are: the first column's title.
        level: Level of the intervals.
    """
    lines = [[f"{what}: variant", "pairs", "diff", f"{100 * level:g} % interval", "p", "p adj", "verdict"]]
    for one in found:
        comparison, end = one.row.comparison, one.conclusion
        if comparison is None or comparison.n == 0:
            lines.append([f"{one.name}: {one.variant}", f"0/{one.row.planned}", *["-"] * 5])
            continue
        has_interval = one.row.failures is None and comparison.sd > 0 and abs(end.high - end.low) < float("inf")
        interval = f"[{end.low:.3g}, {end.high:.3g}]" if has_interval else "-"
        mark = "" if one.row.failures is None else "*"
        cells = [f"{comparison.n}/{one.row.planned}", f"{comparison.mean:.3g}{mark}", interval]
        lines.append(
            [f"{one.name}: {one.variant}", *cells, p_text(one.row.p), p_text(one.adjusted), end.verdict],
        )
    return lines


def _outcomes(row: Row) -> dict[int, Fraction | None]:
    return {**{seed: exact(value) for seed, value in row.values.items()}, **dict.fromkeys(row.failed)}


def _differences(report: Findings, row: Row) -> dict[int, Fraction]:
    own, baseline = row.values, report.rows[0].values
    return {seed: exact(value) - exact(baseline[seed]) for seed, value in own.items() if seed in baseline}


def _scores(report: Findings, row: Row) -> dict[int, Fraction]:
    """What is tested: the differences, or the signed ranks of all pairs if a run of one failed."""
    if row.failures is None:
        return _differences(report, row)
    return signed_ranks(_outcomes(row), _outcomes(report.rows[0]), report.mode)
