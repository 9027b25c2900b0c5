"""What a study has found: tables, sentences in words and a picture, in which no run is left out without a word."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics as plain
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal

from .results import BASELINE, Result, Variant
from .statistics import EXACT_UP_TO, FLIPS, Comparison, Effect, compare, effects, exact, fewest_seeds, holm

__all__ = ["Report", "Row"]

WIDTH = 120
"""Columns of a terminal that a table may take."""


@dataclass(frozen=True)
class Row:
    """What the runs of one variant came to.

    Attributes:
        variant: which one.
        values: the metric of each run that finished, by its seed.
        planned: how many runs there should be.
        failed: what the failed runs died of, by their seeds. A run whose metric is infinite or NaN has failed as well.
        missing: seeds of which there is no run.
        differences: to the baseline, by seed, where both runs finished.
        mean: of the metric; NaN without a run that finished.
        sd: its standard deviation over the seeds; NaN below two.
        comparison: of the differences; None for the baseline itself.
        adjusted: p after Holm over all variants of the report but the baseline; None for the baseline itself.
        seconds: of a run that finished, on average; NaN without one.
        steps: optimizer steps of a run that finished, on average; NaN without one.
        memory: the largest peak of a run that finished, in bytes; 0 if it is not known.
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
        """How many runs finished."""
        return len(self.values)

    @property
    def without_pair(self) -> tuple[int, ...]:
        """Seeds that finished here, but not with the baseline."""
        return () if self.comparison is None else tuple(seed for seed in self.values if seed not in self.differences)


class Report:
    """The results of a study, variant by variant, each compared with the baseline over the seeds that both finished.

    ``print(report)`` shows the table; :meth:`sentences` says the same in words; :meth:`markdown`, :meth:`csv`, :meth:`latex`,
    :meth:`to_dict` and :meth:`plot` are for elsewhere. The statistics are those of :mod:`signalfire.ablation.statistics`: Student-t
    intervals, which are not adjusted for how many there are, exact sign-flip tests, and Holm over all variants but the baseline, also
    those of which no pair of runs finished.

    Args:
        results: of the runs, failed ones among them; at most one for each variant and seed.
        variants: all that were planned, the baseline among them.
        metric: its name.
        mode: whether a smaller ("min") or a larger ("max") one is better.
        baseline: the name of the variant with which the others are compared.
        level: of the intervals; a difference counts as shown if its adjusted p is at most 1 - level.
        seeds: those that were planned; by default all that any result has.
        percent: whether sentences tell the metric in percentage points (100 times its value). By default if "accuracy" is part of its
            name and all of its values are between 0 and 1.

    Attributes:
        rows: one for each variant, the baseline first.
        needed: how many seeds it takes to show any difference (:func:`fewest_seeds`); None if no number does.

    Errors:
        ValueError: an argument is wrong, a result belongs to no variant or to no planned seed, or there are two of one run.

    Example:
        >>> variants = [Variant("baseline"), Variant("- ema", off=frozenset({"ema"}))]
        >>> results = [Result("baseline", seed, (90 + seed) / 100) for seed in range(6)]
        >>> results += [Result("- ema", seed, (88 + seed + seed % 2) / 100) for seed in range(6)]
        >>> print(*Report(results, variants, metric="accuracy", mode="max").sentences())
        Without ema, accuracy fell by 1.5 percentage points (95 % interval 0.9 to 2.1, p = 0.031, 6 seeds): it earns its place.
    """  # noqa: E501

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
            raise ValueError(f'Report(mode={mode!r}): it has to be "min" or "max"')
        if not 0 < level < 1:
            raise ValueError(f"Report(level={level!r}): it has to be between 0 and 1, such as 0.95")
        self.metric, self.mode, self.baseline, self.level = metric, mode, baseline, level
        self.seeds = tuple(sorted({result.seed for result in results} if seeds is None else set(seeds)))
        self.rows = self._rows(results, variants)
        self._results, self._variants = list(results), list(variants)
        values = [value for row in self.rows for value in row.values.values()]
        if percent is None:
            percent = "accuracy" in metric.lower() and all(0 <= value <= 1 for value in values)
        self.percent = percent
        try:
            self.needed: int | None = fewest_seeds(max(1, self.comparisons), self.alpha)
        except ValueError:
            self.needed = None
        self._digits = _digits([row.sd for row in self.rows] + [_half(row.comparison) for row in self.rows], values)

    @property
    def alpha(self) -> float:
        """The level of the tests, 1 - level."""
        return round(1 - self.level, 12)

    @property
    def comparisons(self) -> int:
        """How many variants are compared with the baseline: the size of the family of Holm's procedure."""
        return len(self.rows) - 1

    def _rows(self, results: Sequence[Result], variants: Sequence[Variant]) -> list[Row]:
        names = [variant.name for variant in variants]
        if self.baseline not in names:
            raise ValueError(f"Report(baseline={self.baseline!r}): it is not among the variants: {names}")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"Report(variants=...): more than one is called {twice}")
        found: dict[tuple[str, int], Result] = {}
        for result in results:
            run = f"Report(results=...): there is a run of variant {result.variant!r} with seed {result.seed}"
            if result.variant not in names:
                raise ValueError(f"{run}, which is not among the variants: {names}")
            if result.seed not in self.seeds:
                raise ValueError(f"{run}, which is not among the seeds: {list(self.seeds)}")
            if (result.variant, result.seed) in found:
                raise ValueError(f"{run} more than once; give the one that counts")
            found[result.variant, result.seed] = result
        of_baseline = self._values(self.baseline, found)
        ordered = sorted(variants, key=lambda variant: variant.name != self.baseline)  # the others stay as they are
        differences = {
            variant.name: {
                seed: exact(value) - exact(of_baseline[seed])
                for seed, value in self._values(variant.name, found).items()
                if seed in of_baseline
            }
            for variant in ordered[1:]
        }
        compared = {name: compare(list(those.values()), level=self.level) for name, those in differences.items()}
        adjusted = dict(zip(compared, holm([comparison.p for comparison in compared.values()]), strict=True))
        rows = []
        for variant in ordered:
            runs = [(seed, found.get((variant.name, seed))) for seed in self.seeds]
            values = self._values(variant.name, found)
            finished = [run for seed, run in runs if run is not None and seed in values]
            rows.append(
                Row(
                    variant=variant,
                    values=values,
                    planned=len(runs),
                    failed={seed: self._reason(run) for seed, run in runs if run is not None and seed not in values},
                    missing=tuple(seed for seed, run in runs if run is None),
                    differences={seed: float(one) for seed, one in differences.get(variant.name, {}).items()},
                    mean=plain.fmean(values.values()) if values else math.nan,
                    sd=plain.stdev(values.values()) if len(values) > 1 else math.nan,
                    comparison=compared.get(variant.name),
                    adjusted=adjusted.get(variant.name),
                    seconds=plain.fmean(run.seconds for run in finished) if finished else math.nan,
                    steps=plain.fmean(run.steps for run in finished) if finished else math.nan,
                    memory=max((run.memory for run in finished), default=0),
                )
            )
        return rows

    def _values(self, name: str, found: Mapping[tuple[str, int], Result]) -> dict[int, float]:
        values = {}
        for seed in self.seeds:
            result = found.get((name, seed))
            if result and result.error is None and result.value is not None and math.isfinite(result.value):
                values[seed] = float(result.value)
        return values

    def _reason(self, result: Result) -> str:
        if result.error is None:
            return f"{self.metric} is {result.value}"
        lines = result.error.strip().splitlines()
        # The last line of a traceback that is not indented and not a note is the one with the error.
        return next(
            (line.strip() for line in reversed(lines) if _ERROR.match(line)), lines[-1].strip() if lines else ""
        )

    def effects(self, order: int = 2) -> list[Effect]:
        """Main effects and interactions, if the variants are a full factorial design (:func:`effects`).

        Errors:
            ValueError: they are not.
        """
        factors = [name for name, _ in self._variants[0].level]
        return effects(
            self._results, factors, min(order, max(1, len(factors))), variants=self._variants, level=self.level
        )

    def warnings(self) -> list[str]:
        """What to know before the numbers are believed: failed and missing runs, and too few seeds."""
        said = []
        for row in self.rows:
            for seed, reason in row.failed.items():
                said.append(f'"{row.variant.name}", seed {seed}: failed: {reason}')
            if row.missing:
                said.append(f'"{row.variant.name}": no run of {_seeds(row.missing)}')
            if row.without_pair:
                said.append(f'"{row.variant.name}": {_seeds(row.without_pair)} left out, as the baseline has none')
        few: dict[int, list[str]] = {}
        for row in self.rows:
            # Without any pair, it has been said above of every run why.
            if row.comparison and row.comparison.n and self._too_few(row.comparison.n):
                few.setdefault(row.comparison.n, []).append(f'"{row.variant.name}"')
        for n, names in few.items():
            of = "" if len(names) == self.comparisons else f" of {_listed(names)}"
            said.append(
                f"Too few seeds{of}: the smallest p that {_count(n, 'pair')} can give is {min(1.0, 2.0 ** (1 - n)):.2g}, "
                f"which Holm multiplies by up to {self.comparisons}; for {self.alpha:g}, {self._needed()}."
            )
        return said

    def _too_few(self, n: int) -> bool:
        return self.needed is None or n < self.needed

    def _needed(self) -> str:
        return "no number of seeds is enough" if self.needed is None else f"at least {self.needed} seeds are needed"

    def sentences(self) -> list[str]:
        """What was found, in words: a sentence for each variant but the baseline, and what became of runs that did not finish."""
        said = []
        for row in self.rows:
            finding = [self._finding(row, row.comparison)] if row.comparison else []
            unfinished = self._unfinished(row)
            if row.comparison is None and unfinished:
                finding = [f'Of "{row.variant.name}", with which the others are compared, not all runs finished.']
            if finding:
                said.append(" ".join(finding + unfinished))
        return said

    def _unfinished(self, row: Row) -> list[str]:
        said = []
        if row.failed:
            reasons = "; ".join(f"seed {seed}: {reason}" for seed, reason in row.failed.items())
            said.append(f"{len(row.failed)} of its {_count(row.planned, 'run')} failed ({reasons}).")
        if row.missing:
            verb = "is" if len(row.missing) == 1 else "are"
            said.append(
                f"{len(row.missing)} of its {_count(row.planned, 'run')} {verb} missing ({_seeds(row.missing)})."
            )
        if row.without_pair:
            verb = "is" if len(row.without_pair) == 1 else "are"
            said.append(
                f"{_seeds(row.without_pair).capitalize()} {verb} left out, as the baseline did not finish there."
            )
        return said

    def _finding(self, row: Row, comparison: Comparison) -> str:
        what, n = self._what(row.variant), comparison.n
        seeds = _count(n, "seed")
        if n == 0:
            return f"{what}, nothing can be said of {self.metric}: no seed finished both there and in the baseline."
        if comparison.sd == 0 and comparison.mean == 0:
            return f"{what}, {self.metric} was exactly the same with {'all ' if n > 1 else ''}{seeds}."
        moved = "fell" if comparison.mean < 0 else "rose"
        size = self._amount(abs(comparison.mean), unit=True)
        if row.adjusted is not None and row.adjusted <= self.alpha:
            sign = -1 if comparison.mean < 0 else 1
            low, high = sorted((sign * comparison.low, sign * comparison.high))
            between = self._between(comparison, low, high)
            return (
                f"{what}, {self.metric} {moved} by {size} ({between}, {self._p(row)}, {seeds}): "
                f"{self._conclusion(row.variant, comparison.mean)}."
            )
        if self._too_few(n):
            between = (
                f"{self._between(comparison, comparison.low, comparison.high, of=' of the change')}, " if n > 1 else ""
            )
            are = "is" if n == 1 else "are"
            return (
                f"{what}, {self.metric} {moved} by {size} ({between}{seeds}), but {seeds} {are} too few for "
                f"{_count(self.comparisons, 'comparison')}: {self._needed()}."
            )
        between = self._between(comparison, comparison.low, comparison.high)
        return (
            f"{what}, {self.metric} shows no difference that {seeds} can show "
            f"(change of {self._amount(comparison.mean, unit=True)}, {between}, {self._p(row)})."
        )

    def _between(self, comparison: Comparison, low: float, high: float, of: str = "") -> str:
        if math.isnan(comparison.low):
            return "with every seed alike, so that there is no interval"
        return f"{100 * self.level:g} % interval{of} {self._amount(low)} to {self._amount(high)}"

    def _p(self, row: Row) -> str:
        p = row.adjusted if row.adjusted is not None else 1.0
        told = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
        if self.comparisons > 1:
            told += " adjusted"
        return told if row.comparison is None or row.comparison.exact else told + ", from drawn signs"

    def _amount(self, number: float, *, unit: bool = False) -> str:
        if not self.percent:
            return _number(number, self._digits)
        told = _number(100 * number, None if self._digits is None else max(1, self._digits - 2))
        return f"{told} percentage points" if unit else told

    def _parts(self, variant: Variant) -> tuple[list[str], list[str], list[tuple[str, str]]]:
        """What the variant lacks, adds and exchanges, compared with the baseline."""
        baseline = self.rows[0].variant
        swapped = [pair for pair in variant.swapped if pair not in baseline.swapped]
        return sorted(variant.off - baseline.off), sorted(baseline.off - variant.off), swapped

    def _what(self, variant: Variant) -> str:
        lacks, adds, swapped = self._parts(variant)
        said = [f"without {_listed(lacks)}"] if lacks else []
        said += [f"with {_listed(adds)}"] if adds else []
        said += [f"with {_listed([f'{new} in place of {old}' for old, new in swapped])}"] if swapped else []
        what = " and ".join(said) if said else f'with "{variant.name}"'
        return what[0].upper() + what[1:]

    def _conclusion(self, variant: Variant, mean: float) -> str:
        lacks, adds, swapped = self._parts(variant)
        better = (mean > 0) == (self.mode == "max")
        if bool(lacks) + bool(adds) + bool(swapped) != 1:
            return f"it is {'better' if better else 'worse'} than the baseline"
        if swapped:
            side = [new if better else old for old, new in swapped]
            return f"{_listed(side)} {'does' if len(side) == 1 else 'do'} better here"
        one = len(lacks or adds) == 1
        if better == bool(adds):
            return "it earns its place" if one else "they earn their place"
        return f"the composition is better without {'it' if one else 'them'}"

    def __str__(self) -> str:
        blocks = [_aligned(self._table())]
        said = self._legend()
        if factorial := self._effects_table():
            blocks.append(_aligned(factorial))
            said.append(
                f"Effects: contrasts within each seed; adjusted: Holm over {_count(len(factorial) - 1, 'effect')}."
            )
        blocks.append("\n".join(textwrap.fill(line, WIDTH) for line in said))
        if warnings := self.warnings():
            blocks.append("\n".join(textwrap.fill(f"! {line}", WIDTH, subsequent_indent="  ") for line in warnings))
        return "\n\n".join(blocks)

    def __repr__(self) -> str:
        return f"Report({len(self.rows)} variants, {len(self.seeds)} seeds, metric={self.metric!r}, mode={self.mode!r})"

    def _legend(self) -> list[str]:
        better = "larger" if self.mode == "max" else "smaller"
        drawn = any(row.comparison and not row.comparison.exact for row in self.rows)
        test = "exact sign-flip test"
        if drawn:
            test += f" up to {EXACT_UP_TO} pairs, {FLIPS:,} drawn sign patterns above"
        to, family = f'to "{self.baseline}"', _count(self.comparisons, "comparison")
        return [
            f"{self.metric}: {better} is better. Difference: paired by seed, {to}, with its {100 * self.level:g} % Student-t "
            f"interval (not adjusted). p: {test}; adjusted: Holm over {family}. d_z: mean difference by its standard deviation. "
            "Seconds and steps: of a run on average; memory: largest peak.",
        ]

    def _table(self) -> list[list[str]]:
        """Its header, and a line for each row."""
        header = ["variant", "runs", self.metric, "sd", "diff", f"{100 * self.level:g} % interval", "p", "p adj", "d_z"]
        lines = [[*header, "seconds", "steps", "memory"]]
        for row in self.rows:
            line = [row.variant.name, f"{row.finished}/{row.planned}"]
            line += [_number(row.mean, self._digits), _number(row.sd, self._digits)]
            line += self._compared(row.comparison, row.adjusted)
            line += [_short(row.seconds), _short(row.steps, whole=True), _size(row.memory)]
            lines.append(line)
        return lines

    def _compared(self, comparison: Comparison | None, adjusted: float | None) -> list[str]:
        if comparison is None or comparison.n == 0:
            return ["-"] * 5
        interval = "-"
        if not math.isnan(comparison.low):
            interval = f"[{_number(comparison.low, self._digits)}, {_number(comparison.high, self._digits)}]"
        tests = ["-", "-"] if comparison.n < 2 else [_p_value(comparison.p), _p_value(adjusted)]
        effect = "-" if comparison.effect is None else f"{comparison.effect:.2f}"
        return [
            _number(comparison.mean, self._digits),
            interval,
            *tests,
            effect if len(effect) < 7 else f"{float(effect):.1e}",
        ]

    def _effects_table(self) -> list[list[str]]:
        if not all(variant.level for variant in self._variants):
            return []
        try:
            found = self.effects()
        except ValueError:  # a part of a factorial design: the variants are compared, and that is all
            return []
        lines = [["effect", "seeds", "effect of it", f"{100 * self.level:g} % interval", "p", "p adj", "d_z"]]
        for one in found:
            of_it = self._compared(one.comparison, one.adjusted)
            lines.append([one.name, f"{one.comparison.n}/{len(self.seeds)}", *of_it])
        return lines

    def markdown(self) -> str:
        """The table, its legend and the warnings as GitHub's Markdown."""
        said = []
        for table in (self._table(), self._effects_table()):
            if table:
                header, *lines = ([_escaped_markdown(cell) for cell in line] for line in table)
                rule = [":--"] + ["--:"] * (len(header) - 1)
                said.append("\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines)))
        said.append("\n".join(_escaped_markdown(line) for line in self._legend()))
        if warnings := self.warnings():
            said.append("\n".join(f"- {_escaped_markdown(line)}" for line in warnings))
        return "\n\n".join(said) + "\n"

    def csv(self) -> str:
        """All rows with every digit; empty where there is no number. Lists of seeds are separated by spaces."""
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
        r"""The table for LaTeX with the package booktabs (``\usepackage{booktabs}``); legend and warnings as comments above."""
        header, *lines = self._table()
        titles = [_escaped_latex(title) if title != "d_z" else "$d_z$" for title in header]
        said = [f"% {' '.join(line.split())}" for line in (*self._legend(), *self.warnings())]
        said += [
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            f"{' & '.join(titles)} \\\\",
            r"\midrule",
        ]
        for name, *cells in lines:
            said.append(f"{' & '.join([_escaped_latex(name), *(_latex_number(cell) for cell in cells)])} \\\\")
        said += [r"\bottomrule", r"\end{tabular}"]
        return "\n".join(said) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Everything, of types that JSON knows; None where there is no number."""
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
        told: dict[str, Any] = _without_nan(found | {"warnings": self.warnings(), "sentences": self.sentences()})
        return told

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws every seed's difference as a dot, their mean and interval, and the line of no difference.

        The dots of a variant lie in the order of the seeds, from top to bottom.

        Args:
            path: of the picture; its ending says of what kind it is, such as .png, .pdf or .svg.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("a picture of a study needs Matplotlib: pip install 'signalfire[ablation]'") from error
        compared = [(row, row.comparison) for row in self.rows if row.comparison is not None]
        figure = Figure(figsize=(8, 1.6 + 0.62 * max(1, len(compared))), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color="0.45", linewidth=1, linestyle="--", zorder=1)
        labels = []
        for place, (row, comparison) in enumerate(compared):
            for number, seed in enumerate(self.seeds):
                if seed in row.differences:
                    height = place + 0.05 + 0.3 * (number / max(1, len(self.seeds) - 1))
                    axes.plot(
                        row.differences[seed], height, "o", color="#0072B2", alpha=0.6, markersize=5, markeredgewidth=0
                    )
            if comparison.n:
                if not math.isnan(comparison.low):
                    ends = [comparison.low, comparison.high]
                    axes.plot(ends, [place - 0.15] * 2, color="black", linewidth=1.8, solid_capstyle="butt", zorder=3)
                axes.plot(comparison.mean, place - 0.15, "D", color="black", markersize=5.5, zorder=4)
            name = "\n".join(textwrap.wrap(row.variant.name, 28)).replace("$", r"\$")
            pairs = f"{comparison.n}/{row.planned} pairs"
            shown = "" if comparison.n < 2 else f", p {_p_value(row.adjusted, '= ')}"
            labels.append(f"{name}\n{pairs}{shown}")
        axes.set_yticks(range(len(compared)), labels)
        axes.set_ylim(max(1, len(compared)) - 0.5, -0.5)
        for edge in range(1, len(compared)):
            axes.axhline(edge - 0.5, color="0.92", linewidth=0.8, zorder=0)
        side = "right" if self.mode == "max" else "left"
        axes.set_xlabel(f"difference in {self.metric} to {self.baseline} (better to the {side})".replace("$", r"\$"))
        axes.set_title(
            f"dots: seeds; diamond and line: mean and {100 * self.level:g} % interval; "
            f"p: sign-flip test{', Holm-adjusted' if self.comparisons > 1 else ''}",
            fontsize="small",
        )
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.06)
        figure.savefig(path, dpi=150)


_ERROR = re.compile(r"[A-Za-z_][\w.]*(:|$)")


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {_listed([str(seed) for seed in seeds])}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _half(comparison: Comparison | None) -> float:
    return math.nan if comparison is None else (comparison.high - comparison.low) / 2


def _digits(spreads: Sequence[float], values: Sequence[float]) -> int | None:
    """How many decimals show two digits of what is uncertain; None: the numbers are too small or too large for any."""
    largest = max((abs(value) for value in values), default=0.0)
    positive = [spread for spread in spreads if spread > 0 and math.isfinite(spread)]
    unit = plain.median(positive) if positive else largest / 100
    digits = 1 - math.floor(math.log10(unit)) if unit > 0 else 1
    return max(0, digits) if digits <= 6 and largest < 1e5 else None


def _number(number: float, digits: int | None) -> str:
    if math.isnan(number):
        return "-"
    if digits is None or abs(number) >= 1e6:
        return f"{number:.3g}"
    text = f"{number:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text  # no "-0.00"


def _p_value(p: float | None, equals: str = "") -> str:
    if p is None:
        return "-"
    if p >= 0.001:
        return f"{equals}{p:.3f}"
    return "< 0.001" if equals else "<0.001"


def _short(number: float, *, whole: bool = False) -> str:
    if math.isnan(number):
        return "-"
    if number >= 1e7:
        return f"{number:.2e}"
    return f"{number:.0f}" if whole or number >= 100 else f"{number:.1f}"


def _size(memory: int) -> str:
    if not memory:
        return "-"
    return f"{memory / 1e6:.0f} MB" if memory < 1e10 else f"{memory / 1e9:.1f} GB"


def _aligned(table: Sequence[Sequence[str]]) -> str:
    """The table in columns, at most 120 wide: long names are wrapped, and what does not fit goes into a second part below."""
    widths = [max(len(line[column]) for line in table) for column in range(1, len(table[0]))]
    longest = max(len(line[0]) for line in table)
    for split in (len(widths), 5, 3, 1):  # how many columns stand beside each other at most
        parts = [range(start, min(start + split, len(widths))) for start in range(0, len(widths), split)]
        room = WIDTH - max(sum(widths[column] + 2 for column in part) for part in parts)
        if room >= min(longest, 16):
            break
    first = max(min(longest, room), 8)
    said = []
    for part in parts:
        for number, line in enumerate(table):
            names = textwrap.wrap(line[0], first) or [""]
            cells = "".join(f"  {line[column + 1]:>{widths[column]}}" for column in part)
            said.append(f"{names[0]:<{first}}{cells}"[:WIDTH].rstrip())
            said += [f"  {more}" if len(more) < first else more for more in names[1:]]
            if number == 0:
                said.append("-" * min(WIDTH, first + sum(widths[column] + 2 for column in part)))
        said.append("")
    return "\n".join(said).rstrip()


def _escaped_markdown(text: str) -> str:
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", " ".join(text.split()))


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


def _escaped_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _latex_number(cell: str) -> str:
    if cell == "-":
        return "--"
    return re.sub(r"-(?=[\d.])", "$-$", _escaped_latex(cell))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
