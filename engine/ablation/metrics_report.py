"""Several metrics of the same runs, with tests that are adjusted over all of them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

from signalfire.authoring.checks import check_choice

from ..authoring.markup import preformatted
from .families import Joined, join, joined_table
from .formats import WIDTH, aligned, count
from .frames import framed
from .rows import Findings

__all__ = ["Correction", "MetricsReport"]

Correction = Literal["all", "variants"]
R = TypeVar("R", bound=Findings)


class MetricsReport(Generic[R]):
    """Comparisons of several metrics of the same runs, as returned by :meth:`Report.metrics`.

    Among five metrics, at least one shows a difference by chance in more than 5 % of studies. With
    ``correction="all"`` the comparisons of all variants and metrics are one family: the probability of any false finding among
    them is at most alpha, however the metrics depend on each other, since swapping the labels of the runs of a seed swaps them in
    all metrics (:mod:`signalfire.ablation.joint`).

    Args:
        reports: The report of each metric, by its name.
        correction: "all" for one family, or "variants" for a separate family per metric, which controls the error of each metric
            alone.

    Attributes:
        reports: The report of each metric, adjusted only over its own variants.
        correction: As given.
        rows: The comparisons, metric by metric.
    """

    def __init__(self, reports: Mapping[str, R], correction: Correction = "all") -> None:
        check_choice("metrics", "correction", correction, ("all", "variants"))
        if not reports:
            raise ValueError(
                "metrics(metrics={}): expected at least one metric with its direction, such as {'loss': 'min'}"
            )
        self.reports = dict(reports)
        self.correction = correction
        families = [self.reports] if correction == "all" else [{name: one} for name, one in self.reports.items()]
        self.rows: list[Joined] = [row for family in families for row in join(family)]

    def __str__(self) -> str:
        first = next(iter(self.reports.values()))
        better = ", ".join(
            f"{name} ({'larger' if one.mode == 'max' else 'smaller'} is better)" for name, one in self.reports.items()
        )
        family = count(sum(one.comparisons for one in self.reports.values()), "comparison")
        if self.correction == "variants":
            family = f"{count(first.comparisons, 'comparison')} for each metric, not across metrics"
        how = "by joint sign flips of"
        if first.pruned:
            how, family = "by Holm's procedure for", f"{family}, with p = 1 for pruned variants"
        legend = f'Differences from "{first.baseline}", paired by seed. Metrics: {better}.'
        legend += f" Intervals and adjusted p: {how} {family}."
        if any(row.row.failures for row in self.rows):
            legend += " *: runs failed. Tests and verdicts use signed ranks; the difference uses only finished pairs."
        return f"{aligned(joined_table(self.rows, 'metric', first.level))}\n\n{textwrap.fill(legend, WIDTH)}"

    def _repr_html_(self) -> str:
        return preformatted(self)

    def frame(self) -> Any:
        """The comparisons, one row each: a ``pandas.DataFrame`` if pandas is installed, else a dict of columns."""
        records = []
        for row in self.rows:
            comparison = row.row.comparison
            record = {
                "metric": row.name,
                "variant": row.variant,
                "difference": comparison.mean if comparison else None,
                "low": row.conclusion.low,
                "high": row.conclusion.high,
                "p": row.row.p,
                "p_adjusted": row.adjusted,
                "verdict": row.conclusion.verdict,
            }
            records.append(
                {name: None if isinstance(one, float) and math.isnan(one) else one for name, one in record.items()}
            )
        return framed(records)
