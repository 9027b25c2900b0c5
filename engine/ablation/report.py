"""The report of a study: tables, sentences and a plot, all of which list failed and missing runs."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any, Literal

from ..markup import preformatted
from .formats import (
    WIDTH,
    aligned,
    count,
    decimals,
    escaped_latex,
    escaped_markdown,
    latex_number,
    number_text,
    p_text,
    short_text,
    size_text,
    without_nan,
)
from .plot import draw
from .results import BASELINE, Result, Variant
from .rows import make_rows
from .sentences import Sentences
from .statistics import EXACT_UP_TO, FLIPS, Comparison, Effect, effects, fewest_seeds

__all__ = ["Report"]


class Report:
    """The results of a study: each variant compared with the baseline over the seeds that both finished.

    ``print(report)`` shows the table, :meth:`sentences` puts it into words, and :meth:`markdown`, :meth:`csv`, :meth:`latex`,
    :meth:`to_dict` and :meth:`plot` export it. The statistics are those of :mod:`signalfire.ablation.statistics`: Student-t
    intervals, not adjusted for multiple comparisons; exact sign-flip tests; and Holm's correction over all variants except the
    baseline, including those of which no pair of runs finished.

    Args:
        results: Results of the runs, including failed ones; at most one per variant and seed.
        variants: All planned variants, including the baseline.
        metric: Name of the metric.
        mode: "min" if smaller is better, "max" if larger is better.
        baseline: Name of the variant with which the others are compared.
        level: Confidence level of the intervals; a difference is significant if its adjusted p is at most 1 - level.
        seeds: The planned seeds; by default all seeds in the results.
        percent: Whether sentences give the metric in percentage points (100 times its value). By default, if "accuracy" is part
            of its name and all of its values are between 0 and 1.

    Attributes:
        rows: One row per variant, the baseline first.
        digits: Number of decimals shown; None for three significant digits.
        needed: Minimum number of seeds for any difference to be significant (:func:`fewest_seeds`); None if no number suffices.

    Raises:
        ValueError: an argument is invalid, a result has an unknown variant or seed, or two results have the same ones.

    Example:
        >>> variants = [Variant("baseline"), Variant("- ema", off=frozenset({"ema"}))]
        >>> results = [Result("baseline", seed, (90 + seed) / 100) for seed in range(6)]
        >>> results += [Result("- ema", seed, (88 + seed + seed % 2) / 100) for seed in range(6)]
        >>> print(*Report(results, variants, metric="accuracy", mode="max").sentences())
        Without ema, accuracy fell by 1.5 percentage points (95 % interval 0.9 to 2.1, p = 0.031, 6 seeds): it contributes.
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
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"Report(mode={mode!r}): expected 'min' or 'max'")
        if not 0 < level < 1:
            raise ValueError(f"Report(level={level!r}): expected a number between 0 and 1, such as 0.95")
        self.metric, self.mode, self.baseline, self.level = metric, mode, baseline, level
        self.seeds = tuple(sorted({result.seed for result in results} if seeds is None else set(seeds)))
        self.rows = make_rows(results, variants, metric=metric, baseline=baseline, seeds=self.seeds, level=level)
        self._results, self._variants = list(results), list(variants)
        values = [value for row in self.rows for value in row.values.values()]
        if percent is None:
            percent = "accuracy" in metric.lower() and all(0 <= value <= 1 for value in values)
        self.percent = percent
        try:
            self.needed: int | None = fewest_seeds(max(1, self.comparisons), self.alpha)
        except ValueError:
            self.needed = None
        compared = [row.comparison for row in self.rows if row.comparison is not None]
        half_widths = [(one.high - one.low) / 2 for one in compared]
        self.digits = decimals([row.sd for row in self.rows] + half_widths, values)

    @property
    def alpha(self) -> float:
        """Significance level of the tests: 1 - level."""
        return round(1 - self.level, 12)

    @property
    def comparisons(self) -> int:
        """Number of variants compared with the baseline: the family size of Holm's correction."""
        return len(self.rows) - 1

    def effects(self, order: int = 2) -> list[Effect]:
        """Main effects and interactions, if the variants are a full factorial design (:func:`effects`).

        Args:
            order: Maximum number of factors in an interaction; 1 for main effects only.

        Raises:
            ValueError: if they are not.
        """
        factors = [name for name, _ in self._variants[0].level]
        return effects(
            self._results, factors, min(order, max(1, len(factors))), variants=self._variants, level=self.level
        )

    def warnings(self) -> list[str]:
        """What limits the conclusions: failed and missing runs, and too few seeds."""
        return Sentences(self).warnings()

    def sentences(self) -> list[str]:
        """The findings in words: a sentence for each variant except the baseline, with its failed and missing runs."""
        return Sentences(self).findings()

    def __str__(self) -> str:
        blocks = [aligned(self._table())]
        notes = self._legend()
        if factorial := self._effects_table():
            blocks.append(aligned(factorial))
            notes.append(
                f"Effects: contrasts within each seed; adjusted: Holm over {count(len(factorial) - 1, 'effect')}."
            )
        blocks.append("\n".join(textwrap.fill(line, WIDTH) for line in notes))
        if warnings := self.warnings():
            blocks.append("\n".join(textwrap.fill(f"! {line}", WIDTH, subsequent_indent="  ") for line in warnings))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __repr__(self) -> str:
        return f"Report({len(self.rows)} variants, {len(self.seeds)} seeds, metric={self.metric!r}, mode={self.mode!r})"

    def _legend(self) -> list[str]:
        better = "larger" if self.mode == "max" else "smaller"
        sampled = any(row.comparison and not row.comparison.exact for row in self.rows)
        test = "exact sign-flip test"
        if sampled:
            test += f" up to {EXACT_UP_TO} pairs, {FLIPS:,} random sign patterns above"
        to, family = f'to "{self.baseline}"', count(self.comparisons, "comparison")
        return [
            f"{self.metric}: {better} is better. Difference: paired by seed, {to}, with its {100 * self.level:g} % Student-t "
            f"interval (not adjusted). p: {test}; adjusted: Holm over {family}. d_z: mean difference divided by its standard "
            "deviation. Seconds and steps: mean per run; memory: maximum peak.",
        ]

    def _table(self) -> list[list[str]]:
        """The header and one line per row."""
        header = ["variant", "runs", self.metric, "sd", "diff", f"{100 * self.level:g} % interval", "p", "p adj", "d_z"]
        lines = [[*header, "seconds", "steps", "memory"]]
        for row in self.rows:
            line = [row.variant.name, f"{row.finished}/{row.planned}"]
            line += [number_text(row.mean, self.digits), number_text(row.sd, self.digits)]
            line += self._compared(row.comparison, row.adjusted)
            line += [short_text(row.seconds), short_text(row.steps, whole=True), size_text(row.memory)]
            lines.append(line)
        return lines

    def _compared(self, comparison: Comparison | None, adjusted: float | None) -> list[str]:
        if comparison is None or comparison.n == 0:
            return ["-"] * 5
        interval = "-"
        if not math.isnan(comparison.low):
            interval = f"[{number_text(comparison.low, self.digits)}, {number_text(comparison.high, self.digits)}]"
        tests = ["-", "-"] if comparison.n < 2 else [p_text(comparison.p), p_text(adjusted)]
        effect = "-" if comparison.effect is None else f"{comparison.effect:.2f}"
        return [
            number_text(comparison.mean, self.digits),
            interval,
            *tests,
            effect if len(effect) < 7 else f"{float(effect):.1e}",
        ]

    def _effects_table(self) -> list[list[str]]:
        if not all(variant.level for variant in self._variants):
            return []
        try:
            found = self.effects()
        except ValueError:  # a fraction of a factorial design: variants are compared, but effects cannot be estimated
            return []
        lines = [["effect", "seeds", "estimate", f"{100 * self.level:g} % interval", "p", "p adj", "d_z"]]
        for one in found:
            of_it = self._compared(one.comparison, one.adjusted)
            lines.append([one.name, f"{one.comparison.n}/{len(self.seeds)}", *of_it])
        return lines

    def markdown(self) -> str:
        """The table, its legend and the warnings as GitHub's Markdown."""
        parts = []
        for table in (self._table(), self._effects_table()):
            if table:
                header, *lines = ([escaped_markdown(cell) for cell in line] for line in table)
                rule = [":--"] + ["--:"] * (len(header) - 1)
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines)))
        parts.append("\n".join(escaped_markdown(line) for line in self._legend()))
        if warnings := self.warnings():
            parts.append("\n".join(f"- {escaped_markdown(line)}" for line in warnings))
        return "\n\n".join(parts) + "\n"

    def csv(self) -> str:
        """All rows at full precision, with an empty cell where there is no number; seeds in a list are separated by spaces."""
        columns = [
            "variant",
            "finished",
            "planned",
            "mean",
            "sd",
            "pairs",
            "difference",
            "low",
            "high",
            "p",
            "p_adjusted",
            "d_z",
        ]
        columns += ["seconds", "steps", "memory", "failed_seeds", "missing_seeds", "seeds_without_pair"]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for row in self.rows:
            one = row.comparison
            line: list[Any] = [row.variant.name, row.finished, row.planned, row.mean, row.sd]
            line += [one.n, one.mean, one.low, one.high, one.p, row.adjusted, one.effect] if one else [None] * 7
            line += [row.seconds, row.steps, row.memory or None]
            line += [" ".join(map(str, seeds)) for seeds in (row.failed, row.missing, row.without_pair)]
            writer.writerow([None if isinstance(cell, float) and math.isnan(cell) else cell for cell in line])
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

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report, as JSON types; None where there is no number."""
        rows = []
        for row in self.rows:
            one = {name: value for name, value in asdict(row).items() if name not in ("variant", "comparison")}
            one["values"] = {str(seed): value for seed, value in row.values.items()}
            one["differences"] = {str(seed): value for seed, value in row.differences.items()}
            one["failed"] = {str(seed): reason for seed, reason in row.failed.items()}
            one |= {"missing": list(row.missing), "without_pair": list(row.without_pair), "finished": row.finished}
            one["variant"] = {
                "name": row.variant.name,
                "off": sorted(row.variant.off),
                "swapped": [list(pair) for pair in row.variant.swapped],
                "level": dict(row.variant.level),
            }
            one["comparison"] = (
                None if row.comparison is None else asdict(row.comparison) | {"exact": row.comparison.exact}
            )
            rows.append(one)
        found = {"metric": self.metric, "mode": self.mode, "baseline": self.baseline, "level": self.level}
        found |= {"seeds": list(self.seeds), "comparisons": self.comparisons, "seeds_needed": self.needed, "rows": rows}
        content: dict[str, Any] = without_nan(found | {"warnings": self.warnings(), "sentences": self.sentences()})
        return content

    def plot(self, path: str | PathLike[str]) -> None:
        """Plot the difference of every seed as a dot, with the mean and interval of each variant and a line at zero.

        The dots of a variant are in the order of the seeds, from top to bottom.

        Args:
            path: File to write; its extension sets the format, such as .png, .pdf or .svg.
        """
        draw(self, path)
