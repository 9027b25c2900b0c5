"""The findings of a study in sentences, and warnings about what limits them."""

from __future__ import annotations

import math

from .formats import count, listed, number_text, seeds_in_words
from .results import Variant
from .rows import Findings, Row
from .statistics import Comparison

__all__ = ["Sentences"]


class Sentences:
    """Writes the sentences and warnings of a report.

    Args:
        report: The report.
    """

    def __init__(self, report: Findings) -> None:
        self.report = report

    def warnings(self) -> list[str]:
        """What limits the conclusions: failed and missing runs, and too few seeds."""
        sentences = []
        for row in self.report.rows:
            for seed, reason in row.failed.items():
                sentences.append(f'"{row.variant.name}", seed {seed}: failed: {reason}')
            if row.missing:
                sentences.append(f'"{row.variant.name}": no run of {seeds_in_words(row.missing)}')
            if row.without_pair:
                sentences.append(
                    f'"{row.variant.name}": {seeds_in_words(row.without_pair)} omitted, because the baseline has no such run'
                )
        few: dict[int, list[str]] = {}
        for row in self.report.rows:
            # Without any finished pair, the sentences above give the reason.
            if row.comparison and row.comparison.n and self._too_few(row.comparison.n):
                few.setdefault(row.comparison.n, []).append(f'"{row.variant.name}"')
        for n, names in few.items():
            of = "" if len(names) == self.report.comparisons else f" of {listed(names)}"
            sentences.append(
                f"Too few seeds{of}: the smallest p that {count(n, 'pair')} can reach is {min(1.0, 2.0 ** (1 - n)):.2g}, "
                f"which Holm multiplies by up to {self.report.comparisons}; for {self.report.alpha:g}, {self._needed()}."
            )
        return sentences

    def _too_few(self, n: int) -> bool:
        return self.report.needed is None or n < self.report.needed

    def _needed(self) -> str:
        return (
            "no number of seeds is enough"
            if self.report.needed is None
            else f"at least {self.report.needed} seeds are needed"
        )

    def findings(self) -> list[str]:
        """The findings in words: a sentence for each variant except the baseline, with its failed and missing runs."""
        sentences = []
        for row in self.report.rows:
            finding = [self._finding(row, row.comparison)] if row.comparison else []
            unfinished = self._unfinished(row)
            if row.comparison is None and unfinished:
                finding = [f'Not all runs of "{row.variant.name}", with which the others are compared, finished.']
            if finding:
                sentences.append(" ".join(finding + unfinished))
        return sentences

    def _unfinished(self, row: Row) -> list[str]:
        sentences = []
        if row.failed:
            reasons = "; ".join(f"seed {seed}: {reason}" for seed, reason in row.failed.items())
            sentences.append(f"{len(row.failed)} of its {count(row.planned, 'run')} failed ({reasons}).")
        if row.missing:
            verb = "is" if len(row.missing) == 1 else "are"
            sentences.append(
                f"{len(row.missing)} of its {count(row.planned, 'run')} {verb} missing ({seeds_in_words(row.missing)})."
            )
        if row.without_pair:
            verb, them = ("is", "it") if len(row.without_pair) == 1 else ("are", "them")
            sentences.append(
                f"{seeds_in_words(row.without_pair).capitalize()} {verb} omitted, because the baseline did not finish {them}."
            )
        return sentences

    def _finding(self, row: Row, comparison: Comparison) -> str:
        what, n = self._what(row.variant), comparison.n
        seeds = count(n, "seed")
        if n == 0:
            return f"{what}, {self.report.metric} cannot be compared: no seed finished both in this variant and in the baseline."
        if comparison.sd == 0 and comparison.mean == 0:
            return f"{what}, {self.report.metric} was exactly the same with {'all ' if n > 1 else ''}{seeds}."
        moved = "fell" if comparison.mean < 0 else "rose"
        size = self._amount(abs(comparison.mean), unit=True)
        if row.adjusted is not None and row.adjusted <= self.report.alpha:
            sign = -1 if comparison.mean < 0 else 1
            low, high = sorted((sign * comparison.low, sign * comparison.high))
            between = self._between(comparison, low, high)
            return (
                f"{what}, {self.report.metric} {moved} by {size} ({between}, {self._p(row)}, {seeds}): "
                f"{self._conclusion(row.variant, comparison.mean)}."
            )
        if self._too_few(n):
            between = (
                f"{self._between(comparison, comparison.low, comparison.high, of=' of the change')}, " if n > 1 else ""
            )
            are = "is" if n == 1 else "are"
            return (
                f"{what}, {self.report.metric} {moved} by {size} ({between}{seeds}), but {seeds} {are} too few for "
                f"{count(self.report.comparisons, 'comparison')}: {self._needed()}."
            )
        between = self._between(comparison, comparison.low, comparison.high)
        return (
            f"{what}, {self.report.metric} shows no significant difference with {seeds} "
            f"(change of {self._amount(comparison.mean, unit=True)}, {between}, {self._p(row)})."
        )

    def _between(self, comparison: Comparison, low: float, high: float, of: str = "") -> str:
        if math.isnan(comparison.low):
            return "the same with every seed, so there is no interval"
        return f"{100 * self.report.level:g} % interval{of} {self._amount(low)} to {self._amount(high)}"

    def _p(self, row: Row) -> str:
        p = row.adjusted if row.adjusted is not None else 1.0
        text = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
        if self.report.comparisons > 1:
            text += " adjusted"
        return text if row.comparison is None or row.comparison.exact else text + ", from random signs"

    def _amount(self, number: float, *, unit: bool = False) -> str:
        if not self.report.percent:
            return number_text(number, self.report.digits)
        text = number_text(100 * number, None if self.report.digits is None else max(1, self.report.digits - 2))
        return f"{text} percentage points" if unit else text

    def _parts(self, variant: Variant) -> tuple[list[str], list[str], list[tuple[str, str]]]:
        """The handlers that the variant removes from the baseline, adds to it, and replaces."""
        baseline = self.report.rows[0].variant
        swapped = [pair for pair in variant.swapped if pair not in baseline.swapped]
        return sorted(variant.off - baseline.off), sorted(baseline.off - variant.off), swapped

    def _what(self, variant: Variant) -> str:
        lacks, adds, swapped = self._parts(variant)
        changes = [f"without {listed(lacks)}"] if lacks else []
        changes += [f"with {listed(adds)}"] if adds else []
        changes += [f"with {listed([f'{new} in place of {old}' for old, new in swapped])}"] if swapped else []
        what = " and ".join(changes) if changes else f'with "{variant.name}"'
        return what[0].upper() + what[1:]

    def _conclusion(self, variant: Variant, mean: float) -> str:
        lacks, adds, swapped = self._parts(variant)
        better = (mean > 0) == (self.report.mode == "max")
        if bool(lacks) + bool(adds) + bool(swapped) != 1:
            return f"it is {'better' if better else 'worse'} than the baseline"
        if swapped:
            side = [new if better else old for old, new in swapped]
            return f"{listed(side)} {'does' if len(side) == 1 else 'do'} better here"
        one = len(lacks or adds) == 1
        if better == bool(adds):
            return "it contributes" if one else "they contribute"
        return f"the composition is better without {'it' if one else 'them'}"
