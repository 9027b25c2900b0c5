"""The report of a study: tables, sentences and a plot, all of which list failed and missing runs."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

from signalfire.authoring.checks import check_choice, did_you_mean

from ..authoring.markup import preformatted
from .factors import factors_of
from .formats import (
    WIDTH,
    aligned,
    count,
    decimals,
    escaped_latex,
    escaped_markdown,
    latex_number,
    listed,
    looks_p_text,
    number_text,
    p_text,
    short_text,
    size_text,
)
from .fractions import aliased_effects, is_fraction
from .frames import content_of, framed, records_of, records_of_runs
from .joint import EXACT_UP_TO, FLIPS
from .looks import Looks
from .metrics_report import Correction, MetricsReport
from .orders import Cumulative, Shapley
from .paper import methods, write_page
from .plot import draw
from .pruning import Pruned, check_left
from .results import BASELINE, Result, Variant
from .rows import Row, Runs, make_rows
from .sentences import Sentences
from .statistics import Comparison, Effect, compare, contributions, effects, seeds_needed
from .verdicts import check_margin

__all__ = ["Report"]


class Report:
    """Results of an ablation study: compares each variant with the baseline over the seeds that both finished.

    ``print(report)`` shows the table, and :meth:`sentences` puts it into words. :meth:`markdown`, :meth:`csv`, :meth:`latex`,
    :meth:`frame`, :meth:`html`, :meth:`to_dict` and :meth:`plot` export it; :meth:`methods` is a paragraph for a paper. Tests are
    exact sign-flip tests, adjusted over all variants except the baseline by the step-down test over joint sign flips; the
    intervals hold for all of them together (:mod:`signalfire.ablation.joint`). A failed run counts as worse than any finished one
    (:mod:`signalfire.ablation.failures`).

    Args:
        results: Results of the runs, including failed ones; at most one per variant and seed.
        variants: All planned variants, including the baseline.
        metric: Name of the metric.
        mode: "min" if smaller is better, "max" if larger is better.
        baseline: Name of the variant that the others are compared with.
        level: Confidence level of the intervals; a difference is significant if its adjusted p is at most 1 - level.
        seeds: The planned seeds in their order; by default all seeds in the results, sorted.
        margin: Largest negligible difference, in the unit of the metric. A variant is then equivalent if its interval is inside
            the margins; else better, worse or undecided, by its interval. This is stricter than two one-sided tests.
        looks: Plan of looks that the study follows.
        seen: Numbers of seeds after which the runs were compared, as far as the store knows.
        pruned: Variants that were pruned by successive halving. They have no row, and their results are ignored; to correct for
            multiple testing they still count in the family, with p = 1, and p-values are adjusted by Holm's procedure
            (:mod:`signalfire.ablation.pruning`).
        facts: Further sentences for `methods`: how the variants were made.
        limits: Further warnings.
        percent: Whether sentences give the metric in percentage points (100 times its value). By default True if its name
            contains "accuracy" and all of its values are between 0 and 1.

    Attributes:
        rows: One row per variant, the baseline first.
        digits: Number of decimals shown; None for three significant digits.
        needed: Minimum number of seeds for any difference to be significant; None if no number suffices. With fewer, the report
            states no direction.

    Raises:
        ValueError: an argument is invalid, a result has an unknown variant or seed, or two results have the same ones.

    Example:
        >>> variants = [Variant("baseline"), Variant("- ema", off=frozenset({"ema"}))]
        >>> results = [Result("baseline", seed, (90 + seed) / 100) for seed in range(6)]
        >>> results += [Result("- ema", seed, (88 + seed + seed % 2) / 100) for seed in range(6)]
        >>> print(*Report(results, variants, metric="accuracy", mode="max").sentences())
        Without ema, accuracy fell by 1.5 percentage points (95 % interval 1.0 to 2.0, p = 0.031, 6 seeds): it contributes.
    """

    def __init__(
        self,
        results: Sequence[Result],
        variants: Sequence[Variant],
        *,
        metric: str,
        mode: Literal["min", "max"],
        baseline: str = BASELINE,
        level: float = 0.95,
        seeds: Sequence[int] | None = None,
        percent: bool | None = None,
        margin: float | None = None,
        looks: Looks | None = None,
        seen: Sequence[int] = (),
        pruned: Sequence[Pruned] = (),
        facts: Sequence[str] = (),
        limits: Sequence[str] = (),
    ) -> None:
        check_choice("Report", "mode", mode, ("min", "max"))
        if not 0 < level < 1:
            raise ValueError(f"Report(level={level!r}): expected a number between 0 and 1, such as 0.95")
        self.metric, self.mode, self.baseline, self.level = metric, mode, baseline, level
        self.margin, self.looks, self.seen = check_margin("Report", margin), looks, tuple(seen)
        self.pruned, self.facts, self.limits = tuple(pruned), tuple(facts), tuple(limits)
        gone = {one.variant.name for one in self.pruned}
        variants = [one for one in variants if one.name not in gone]
        results = [one for one in results if one.variant not in gone]
        self.seeds = tuple(sorted({result.seed for result in results}) if seeds is None else dict.fromkeys(seeds))
        runs = Runs(results, variants, baseline, self.seeds, mode)
        self.rows = make_rows(runs, metric, level, margin=self.margin, looks=looks, pruned=len(self.pruned))
        self._results, self._variants = list(results), list(variants)
        values = [value for row in self.rows for value in row.values.values()]
        if percent is None:
            percent = "accuracy" in metric.lower() and all(0 <= value <= 1 for value in values)
        self.percent = percent
        self.needed = seeds_needed(self.comparisons if self.pruned else 1, self.alpha)
        self.digits = _decimals_of(self.rows, values)

    @property
    def alpha(self) -> float:
        """Significance level of the tests: 1 - level."""
        return round(1 - self.level, 12)

    @property
    def comparisons(self) -> int:
        """Number of variants compared with the baseline, or pruned before: the size of the family."""
        return len(self.rows) - 1 + len(self.pruned)

    @property
    def results(self) -> tuple[Result, ...]:
        """The results of all runs, as given."""
        return tuple(self._results)

    def effects(self, order: int = 2) -> list[Effect]:
        """Main effects and interactions, if the variants are a full factorial design (:func:`effects`) or a regular fraction.

        In a fraction, an effect is estimated as its sum with its aliases.

        Args:
            order: Maximum number of factors in an interaction; 1 for main effects only.

        Raises:
            ValueError: if they are not, or some of them were pruned.
        """
        check_left("effects", self.pruned, {one.variant.name for one in self.pruned if one.variant.level})
        if is_fraction(self._variants):
            return aliased_effects(self._results, self._variants, order, self.level)
        factors = factors_of(self._variants[0])
        return effects(
            self._results, factors, min(order, max(1, len(factors))), variants=self._variants, level=self.level
        )

    def contributions(self, design: Cumulative | Shapley) -> list[Effect]:
        """What each handler adds, in the order of a `Cumulative` design or averaged over all orders (`Shapley`).

        Only seeds whose runs all finished count. Positive values mean that the metric is larger with the handler.

        Args:
            design: The design that was run.

        Raises:
            ValueError: if variants of it were not run, or were pruned.
        """
        weights = design.weights()
        check_left("contributions", self.pruned, {name for those in weights.values() for name in those})
        return contributions(self._results, weights, self.level)

    def sampling_intervals(self, design: Shapley) -> dict[str, tuple[float, float]]:
        """Intervals of sampled Shapley values around those of all orders, by handler; zero width if these are exact.

        Student-t intervals of a handler's contribution over the sampled orders, each averaged with its reverse. The ends are NaN
        if the orders give no interval: for a single pair of orders, and for pairs that are equal except for rounding.
        """
        found = {}
        rounding = max(math.ulp(one.value) for one in self._results if one.value is not None)
        for one in self.contributions(design):
            found[one.name] = (one.comparison.mean, one.comparison.mean)
            if not design.exact:
                pairs = contributions(self._results, design.of_pairs(one.name), self.level)
                both = compare([pair.comparison.mean for pair in pairs], level=self.level)
                found[one.name] = (both.low, both.high) if both.sd > rounding else (math.nan, math.nan)
        return found

    def metrics(
        self, metrics: Mapping[str, Literal["min", "max"]], *, correction: Correction = "all"
    ) -> MetricsReport[Report]:
        """Compare several metrics of the same runs, with p-values and intervals adjusted over all of them.

        Args:
            metrics: Direction of each metric by name: "min" if smaller is better, "max" if larger is better.
            correction: "all": all variants and metrics are one family; "variants": those of one metric. Variants that were pruned
                count in the family, with p = 1 for each metric, as in the report itself.

        Raises:
            KeyError: for a metric that no run has.
            ValueError: with planned looks, whose error is that of one metric.

        Example:
            >>> variants = [Variant("baseline"), Variant("- ema", off=frozenset({"ema"}))]
            >>> def run(name, seed, loss):
            ...     return Result(name, seed, loss, {"loss": loss, "accuracy": 1 - loss / 2})
            >>> runs = [run("baseline", seed, 0.5 + seed / 100) for seed in range(6)]
            >>> runs += [run("- ema", seed, 0.6 + seed / 50) for seed in range(6)]
            >>> report = Report(runs, variants, metric="loss", mode="min")
            >>> [
            ...     (row.name, row.adjusted)
            ...     for row in report.metrics({"loss": "min", "accuracy": "max"}).rows
            ... ]
            [('loss', 0.03125), ('accuracy', 0.03125)]
        """
        if self.looks is not None:
            raise ValueError("metrics(): planned looks cover only one metric; omit looks= to compare several metrics")
        there = {name for one in self._results for name in one.metrics}
        reports = {}
        for name, mode in metrics.items():
            if name not in there:
                raise KeyError(
                    f"metrics(metrics={{{name!r}: {mode!r}}}): no run has this metric; available metrics: "
                    f"{', '.join(sorted(there)) or 'none'}{did_you_mean(name, sorted(there))}"
                )
            reports[name] = Report(
                [replace(one, value=None if one.error else one.metrics.get(name)) for one in self._results],
                self._variants,
                metric=name,
                mode=mode,
                baseline=self.baseline,
                level=self.level,
                seeds=self.seeds,
                margin=self.margin if name == self.metric else None,
                pruned=self.pruned,
            )
        return MetricsReport(reports, correction)

    def warnings(self) -> list[str]:
        """Limits of the conclusions: failed and missing runs, and too few seeds."""
        return Sentences(self).warnings()

    def sentences(self) -> list[str]:
        """The findings in words: a sentence for each variant except the baseline, with its failed and missing runs.

        For a factorial design, also a sentence for each main effect and interaction of two factors.
        """
        sentences = Sentences(self)
        return sentences.findings() + sentences.of_effects(self._effects())

    def __str__(self) -> str:
        blocks = [aligned(self._table())]
        notes = self._legend()
        if factorial := self._effects_table():
            blocks.append(aligned(factorial))
            notes.append(
                "Effects: contrasts within each seed; intervals and adjusted p: jointly over "
                f"{count(len(factorial) - 1, 'effect')}."
            )
            if is_fraction(self._variants):
                notes.append(
                    "Fractional factorial design: effects joined by + are aliases, and the estimate is their sum."
                )
        blocks += [aligned(table) for table in self._further_tables()]
        blocks.append("\n".join(textwrap.fill(line, WIDTH) for line in notes))
        if warnings := self.warnings():
            blocks.append("\n".join(textwrap.fill(f"! {line}", WIDTH, subsequent_indent="  ") for line in warnings))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __repr__(self) -> str:
        return f"Report({len(self.rows)} variants, {len(self.seeds)} seeds, metric={self.metric!r}, mode={self.mode!r})"

    def _legend(self, *, brief: bool = False) -> list[str]:
        better = "larger" if self.mode == "max" else "smaller"
        sampled = any(row.comparison and not row.comparison.exact for row in self.rows)
        test = "exact sign-flip test"
        if sampled:
            test += f" up to {EXACT_UP_TO} pairs, {FLIPS:,} random sign patterns above"
        family = count(self.comparisons, "comparison")
        interval, adjusted = f"simultaneous {100 * self.level:g} % interval", "step-down over joint sign flips of"
        if self.looks is not None:
            interval, adjusted = (
                f"{interval} for all looks",
                f"for looks at {listed([str(n) for n in self.looks.sizes])} seeds and",
            )
        if self.pruned:
            adjusted = "by Holm's procedure for"
            family += f", {len(self.pruned)} of them pruned"
        how = (
            f'{self.metric}: {better} is better. Difference from "{self.baseline}": paired by seed, with its '
            f"{interval}. p: {test}; adjusted: {adjusted} {family}. "
        )
        columns = "d_z: mean difference divided by its standard deviation. Seconds and steps: mean per run; memory: maximum peak."
        notes = [columns if brief else how + columns]
        if self.pruned:
            evidence = [
                f"{one.variant.name} after epoch {one.epoch} (number {one.place} of {one.of})" for one in self.pruned
            ]
            notes.append(
                f"Pruned, by the mean rank within seeds: {'; '.join(evidence)}. These variants were not trained to the "
                "end, so no effects are reported for them."
            )
        if self.margin is not None:
            notes.append(
                f"Verdict: equivalent if the interval lies inside +-{self.margin:g}, better or worse if it lies on one "
                "side of 0, and undecided otherwise."
            )
        if any(row.failures for row in self.rows):
            notes.append(
                "*: runs failed. p is from signed ranks over all pairs, where a failed run ranks below any finished "
                "one. The difference and its unadjusted Student-t interval use only pairs that finished, so they are "
                "conditional on finishing."
            )
        return notes

    def _table(self) -> list[list[str]]:
        """The header and one line per row."""
        header = ["variant", "runs", self.metric, "sd", "diff", f"{100 * self.level:g} % interval", "p", "p adj", "d_z"]
        header += ["verdict"] if self.margin is not None else []
        lines = [[*header, "seconds", "steps", "memory"]]
        for row in self.rows:
            line = [row.variant.name, f"{row.finished}/{row.planned}"]
            line += [number_text(row.mean, self.digits), number_text(row.sd, self.digits)]
            line += self._of_row(row)
            line += [row.verdict or "-"] if self.margin is not None else []
            line += [short_text(row.seconds), short_text(row.steps, whole=True), size_text(row.memory)]
            lines.append(line)
        lines += [[one.variant.name, "pruned", *["-"] * len(lines[0][2:])] for one in self.pruned]
        return lines

    def _of_row(self, row: Row) -> list[str]:
        if row.comparison is None or row.conclusion is None:
            return ["-"] * 5
        if row.failures is None:
            ends = (row.conclusion.low, row.conclusion.high)
            return self._compared(row.comparison, ends, row.p, row.adjusted)
        ends = (row.comparison.low, row.comparison.high)
        difference, interval, _, _, effect = self._compared(row.comparison, ends, None, None)
        marked = [cell if cell == "-" else f"{cell}*" for cell in (difference, interval)]
        return [*marked, p_text(row.p), self._adjusted(row.adjusted), effect]

    def _adjusted(self, p: float | None) -> str:
        return p_text(p) if self.looks is None or p is None else looks_p_text(p, self.alpha)

    def _compared(
        self, comparison: Comparison, ends: tuple[float, float], p: float | None, adjusted: float | None
    ) -> list[str]:
        if comparison.n == 0:
            return ["-"] * 5
        interval = "-"
        if comparison.sd > 0 and not all(map(math.isinf, ends)):
            interval = f"[{number_text(ends[0], self.digits)}, {number_text(ends[1], self.digits)}]"
        tests = ["-", "-"] if comparison.n < 2 else [p_text(p), self._adjusted(adjusted)]
        effect = "-" if comparison.effect is None else f"{comparison.effect:.2f}"
        return [
            number_text(comparison.mean, self.digits),
            interval,
            *tests,
            effect if len(effect) < 7 else f"{float(effect):.1e}",
        ]

    def _effects(self) -> list[Effect]:
        if not all(variant.level for variant in self._variants):
            return []
        try:
            return self.effects()
        except ValueError:  # combinations from which no effects can be estimated: only variants are compared
            return []

    def _effects_table(self) -> list[list[str]]:
        if not (found := self._effects()):
            return []
        lines = [["effect", "seeds", "estimate", f"{100 * self.level:g} % interval", "p", "p adj", "d_z"]]
        for one in found:
            of_it = self._compared(one.comparison, (one.low, one.high), one.comparison.p, one.adjusted)
            lines.append([one.name, f"{one.comparison.n}/{len(self.seeds)}", *of_it])
        return lines

    def _further_tables(self) -> list[list[list[str]]]:
        """Tables that come after these, in reports of several tasks."""
        return []

    def _further_pictures(self) -> list[tuple[str, str]]:
        """Titles and SVG of pictures that come after these, likewise."""
        return []

    def markdown(self) -> str:
        """The table, its legend and the warnings as GitHub's Markdown."""
        parts = []
        for table in (self._table(), self._effects_table(), *self._further_tables()):
            if table:
                header, *lines = ([escaped_markdown(cell) for cell in line] for line in table)
                rule = [":--"] + ["--:"] * (len(header) - 1)
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines)))
        parts.append("\n".join(escaped_markdown(line) for line in self._legend()))
        if warnings := self.warnings():
            parts.append("\n".join(f"- {escaped_markdown(line)}" for line in warnings))
        return "\n\n".join(parts) + "\n"

    def csv(self) -> str:
        """All rows at full precision, with empty cells for missing numbers; seeds in a list are separated by spaces.

        The columns low and high are the simultaneous interval.
        """
        records = self._records()
        text = io.StringIO()
        writer = csv.DictWriter(text, records[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()

    def latex(self) -> str:
        r"""The table for LaTeX with booktabs (``\usepackage{booktabs}``); the legend and warnings are comments above it."""
        header, *lines = self._table()
        titles = [escaped_latex(title) if title != "d_z" else "$d_z$" for title in header]
        parts = [f"% {' '.join(line.split())}" for line in (*self._legend(), *self.warnings())]
        parts += [
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            f"{' & '.join(titles)} \\\\",
            r"\midrule",
        ]
        for name, *cells in lines:
            parts.append(f"{' & '.join([escaped_latex(name), *(latex_number(cell) for cell in cells)])} \\\\")
        parts += [r"\bottomrule", r"\end{tabular}"]
        return "\n".join(parts) + "\n"

    def frame(self) -> Any:
        """The columns of `csv`, one row per variant: a ``pandas.DataFrame`` if pandas is installed, else a dict of columns."""
        return framed(self._records())

    def _records(self) -> list[dict[str, Any]]:
        return records_of(self.rows, self.pruned)

    def runs(self) -> Any:
        """All runs, one row each, with seed, costs and metrics; failed ones with the last line of their error. As `frame`."""
        return framed(records_of_runs(self._results, self.metric))

    def methods(self) -> str:
        """One paragraph for a paper: the comparison, its seeds, and the statistical tests.

        Example:
            >>> variants = [Variant("baseline"), Variant("- ema", off=frozenset({"ema"}))]
            >>> runs = [
            ...     Result(one.name, seed, 0.9 + seed / 100) for one in variants for seed in range(6)
            ... ]
            >>> Report(runs, variants, metric="accuracy", mode="max").methods()[:55]
            '1 variant was compared with "baseline" over 6 seeds (0 '
        """
        return methods(self)

    def html(self, path: str | PathLike[str]) -> None:
        """Write the report as one self-contained HTML file: findings, picture, tables, and provenance.

        Args:
            path: File to write, ending with ".html"; its folder is created if necessary.
        """
        write_page(
            self,
            path,
            tables=[table for table in (self._table(), self._effects_table(), *self._further_tables()) if table],
            sentences=self.sentences(),
            warnings=self.warnings(),
            legend=self._legend(brief=True),  # the methods have the rest
            pictures=self._further_pictures(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report, as JSON types; None for missing numbers."""
        return content_of(self) | {"warnings": self.warnings(), "sentences": self.sentences()}

    def plot(self, path: str | PathLike[str]) -> None:
        """Plot the difference of every seed as a dot, with the mean and interval of each variant and a line at zero.

        The dots of a variant are in the order of the seeds, from top to bottom.

        Args:
            path: File to write; its extension sets the format, such as .png, .pdf or .svg.
        """
        draw(self, path)


def _decimals_of(rows: Sequence[Row], values: Sequence[float]) -> int | None:
    compared = [row.comparison for row in rows if row.comparison is not None]
    half_widths = [(one.high - one.low) / 2 for one in compared]  # Student's, which are finite
    return decimals([row.sd for row in rows] + half_widths, values)
