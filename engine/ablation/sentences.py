"""The findings of a study in sentences, and warnings about what limits them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .detectability import detectable
from .failures import Failures
from .formats import count, listed, number_text, seeds_in_words
from .joint import smallest_p
from .results import Variant
from .rows import Findings, Row
from .statistics import Comparison, Effect
from .verdicts import Conclusion, conclude

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
                sentences.append(f'"{row.variant.name}": no run with {seeds_in_words(row.missing)}')
            if row.without_pair:
                sentences.append(
                    f'"{row.variant.name}": the differences omit {seeds_in_words(row.without_pair)}, for which the '
                    "baseline has no finished run"
                )
        sentences += self._few_seeds()
        if gone := sum(bool(one.variant.level) for one in self.report.pruned):
            sentences.append(
                f"No factor effects are reported, because they require the runs of all combinations, and {gone} of "
                f"these {'was' if gone == 1 else 'were'} pruned."
            )
        return [*sentences, *self.report.limits, *self._looks()]

    def _few_seeds(self) -> list[str]:
        few: dict[int, list[str]] = {}
        for row in self.report.rows:
            # Without any finished pair, the sentences on failed and missing runs give the reason.
            if row.comparison and row.comparison.n and self._too_few(row.comparison.n):
                few.setdefault(row.comparison.n, []).append(f'"{row.variant.name}"')
        sentences = []
        for n, names in few.items():
            of = "" if len(names) == self.report.comparisons else f" for {listed(names)}"
            sentences.append(
                f"Too few seeds{of}: the smallest p that {count(n, 'pair')} can reach is {self._smallest(n):.2g}, so "
                f"no direction is reported. For a level of {self.report.alpha:g}, {self._needed()}."
            )
        return sentences

    def _looks(self) -> list[str]:
        looks = self.report.looks
        seen = [size for size in self.report.seen if not self._too_few(size)]  # those that could find anything
        if looks is None:
            if len(seen) < 2:
                return []
            return [
                f"The results were looked at after {listed([str(size) for size in seen])} seeds, without a plan. "
                "Adding seeds until a difference appears leads to a false positive in more than "
                f"{100 * self.report.alpha:g} % of studies. Plan the looks with Study(looks=[...])."
            ]
        sentences = []
        if other := [str(size) for size in seen if size not in looks.sizes]:
            sentences.append(
                f"Some results were looked at after {listed(other)} seeds, which was not planned. The error rate "
                "holds only for looks that are planned before the first run."
            )
        made = [row.look for row in self.report.rows if row.comparison is not None]
        if None in made:
            sentences.append(
                f"No look has been taken yet, because the runs of the first {looks.sizes[0]} seeds are not complete."
            )
        return sentences

    def _smallest(self, n: int) -> float:
        return min(1.0, smallest_p(n) * (self.report.comparisons if self.report.pruned else 1))

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
            finding = [self._finding(row, row.comparison, row.conclusion)] if row.comparison and row.conclusion else []
            unfinished = self._unfinished(row)
            if row.comparison is None and unfinished:
                finding = [f'Not all runs of "{row.variant.name}", the reference for all comparisons, finished.']
            if finding:
                sentences.append(" ".join(finding + unfinished))
        return sentences + [str(one) for one in self.report.pruned]

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
            sentences.append(
                f"The differences omit {seeds_in_words(row.without_pair)}, for which the baseline has no finished run."
            )
        return sentences

    def _finding(self, row: Row, comparison: Comparison, conclusion: Conclusion) -> str:
        what, metric, n = self._what(row.variant), self.report.metric, comparison.n
        if row.failures is not None:
            return f"{what}, {self._with_failures(row, comparison, row.failures, conclusion)}"
        seeds = count(n, "seed")
        if n == 0:
            return (
                f"{what}, {metric} cannot be compared: no seed has finished runs of both the variant and the baseline."
            )
        if comparison.sd == 0 and comparison.mean == 0:
            return f"{what}, {metric} was exactly the same with {'all ' if n > 1 else ''}{seeds}."
        if self._too_few(n):
            are = "is" if n == 1 else "are"
            return f"{what}, {seeds} {are} too few to say in which direction {metric} changes: {self._needed()}."
        facts = f"{self._between(comparison, conclusion)}, {self._p(row)}"
        change = f"change of {self._amount(comparison.mean, unit=True)}, {facts}"
        if conclusion.verdict == "equivalent":
            sign = {1: ", although it rose", -1: ", although it fell", 0: ""}[conclusion.sign]
            return f"{what}, {metric} is equivalent within {self._margin()} ({change}, {seeds}){sign}."
        if conclusion.verdict == "undecided":
            margin = "" if self.report.margin is None else f"; it may differ by {self._margin()} or more"
            found = self._would_have_found(n, comparison)
            return f"{what}, {metric} shows no significant difference with {seeds} ({change}){margin}{found}."
        moved = "fell" if conclusion.sign < 0 else "rose"
        size = self._amount(abs(comparison.mean), unit=True)
        facts = f"{self._between(comparison, conclusion, conclusion.sign)}, {self._p(row)}"
        return f"{what}, {metric} {moved} by {size} ({facts}, {seeds}): {self._conclusion(row.variant, conclusion)}."

    def _with_failures(self, row: Row, comparison: Comparison, failures: Failures, conclusion: Conclusion) -> str:
        pairs = comparison.n + failures.variant + failures.baseline + failures.both
        sentences = [
            f"runs failed: in {failures.variant} of {count(pairs, 'pair')}, only the run of this variant; in "
            f"{failures.baseline}, only the run of the baseline; in {failures.both}, both runs (McNemar's exact test: "
            f"p = {failures.p:.2g})."
        ]
        ranked = f"When all pairs are ranked, with failed runs below finished ones, {self.report.metric}"
        facts = f"({self._p(row)}, {count(pairs, 'seed')})"
        if self._too_few(pairs):
            sentences.append(f"There are too few pairs to say more: {self._needed()}.")
        elif conclusion.verdict == "undecided":
            more = failures.variant - failures.baseline
            why = ", and a variant that fails more often is not recommended" if more else ""
            sentences.append(f"{ranked} shows no significant difference {facts}{why}.")
        else:
            sentences.append(f"{ranked} is {conclusion.verdict} {facts}: {self._conclusion(row.variant, conclusion)}.")
        if comparison.n and not self._too_few(comparison.n):
            between = self._student(comparison)
            sentences.append(
                f"In pairs where both runs finished, {self.report.metric} changed by "
                f"{self._amount(comparison.mean, unit=True)} ({between}, {count(comparison.n, 'pair')}; conditional on "
                "finishing, so this is not an effect of the variant)."
            )
        return " ".join(sentences)

    def of_effects(self, found: Sequence[Effect]) -> list[str]:
        """A sentence for each main effect and interaction of a factorial design.

        Args:
            found: The effects of one family.
        """
        return [self._of_effect(one, len(found)) for one in found]

    def _of_effect(self, effect: Effect, family: int) -> str:
        omitted = ""
        if effect.left_out:
            seeds = seeds_in_words(effect.left_out)
            omitted = f" (The estimate omits {seeds}, where not all runs finished, so it is conditional on finishing.)"
        return f"{_subject(effect)}{self._predicate(effect, family)}.{omitted}"

    def _predicate(self, effect: Effect, family: int) -> str:
        """What an effect does, as the rest of a sentence that begins with its name."""
        one, metric, n = effect.comparison, self.report.metric, effect.comparison.n
        if n == 0:
            return ": no seed has all the runs that this effect requires"
        seeds = count(n, "seed")
        if one.sd == 0 and one.mean == 0:
            return f" did not change {metric} with any seed ({seeds})"
        if self._too_few(n):
            are = "is" if n == 1 else "are"
            return f": {seeds} {are} too few to say in which direction {metric} changes: {self._needed()}"
        conclusion = conclude(
            (effect.low, effect.high),
            one.mean,
            effect.adjusted <= self.report.alpha,
            mode=self.report.mode,
            margin=self.report.margin,
        )
        p = self._p_text(effect.adjusted, family, exact=one.exact)
        change = f"{self._amount(one.mean, unit=True)}, {self._between(one, conclusion)}, {p}, {seeds}"
        if conclusion.verdict == "equivalent":
            return f" changes {metric} by less than {self._margin()} ({change})"
        if conclusion.verdict == "undecided":
            return f" has no significant effect on {metric} ({change}){self._would_have_found(n, one, family)}"
        return self._significant(effect, conclusion, f"{p}, {seeds}")

    def _significant(self, effect: Effect, conclusion: Conclusion, facts: str) -> str:
        one = effect.comparison
        verb = "raises" if conclusion.sign > 0 else "lowers"
        is_clear = len(effect.factors) == 1 and not effect.left_out and not effect.aliases
        better = f": {self._side(conclusion.verdict == 'better')}" if is_clear else ""
        size = self._amount(abs(one.mean), unit=True)
        over = "" if len(effect.factors) > 1 else ", averaged over the other factors"
        facts = f"{self._between(one, conclusion, conclusion.sign)}, {facts}"
        return f" {verb} {self.report.metric} by {size}{over} ({facts}){better}"

    def _side(self, better: bool) -> str:
        return "it contributes" if better else "the setup is better without it"

    def _would_have_found(self, n: int, comparison: Comparison, family: int | None = None) -> str:
        """What could have been found: that nothing was found does not mean that nothing is there."""
        looks = self.report.looks
        alpha = self.report.alpha if looks is None or n not in looks.sizes else round(looks.added(n), 12)
        family = family or self.report.comparisons
        if self.report.pruned:  # Holm's first step
            alpha, family = round(alpha / family, 12), 1
        size = detectable(n, family, alpha=alpha) * comparison.sd
        if not 0 < size < math.inf:
            return ""
        return (
            f"; a difference of {self._amount(size, unit=True)} would be detected with a probability of 80 %, so a smaller "
            "one may exist"
        )

    def _between(self, comparison: Comparison, conclusion: Conclusion, sign: int = 1) -> str:
        if comparison.sd == 0:
            return "the same with every seed, so there is no interval"
        if math.isinf(conclusion.low) and math.isinf(conclusion.high):
            return "too few seeds for an interval"
        low, high = sorted((sign * conclusion.low, sign * conclusion.high))
        text = f"{100 * self.report.level:g} % interval {self._amount(low)} to {self._amount(high)}"
        return f"{text}, bounded at 0 by the correction for multiple comparisons" if conclusion.cut else text

    def _student(self, comparison: Comparison) -> str:
        if math.isnan(comparison.low):
            return "the same with every seed"
        low, high = self._amount(comparison.low), self._amount(comparison.high)
        return f"{100 * self.report.level:g} % interval {low} to {high}"

    def _p(self, row: Row) -> str:
        if self.report.looks is not None:
            where = f"as of the look at {row.look} seeds" if row.look else "no look yet"
            is_found = row.adjusted is not None and row.adjusted <= self.report.alpha
            return f"p {'<=' if is_found else '>'} {self.report.alpha:g} over all looks, {where}"
        p = row.adjusted if row.adjusted is not None else 1.0
        return self._p_text(p, self.report.comparisons, exact=row.comparison is None or row.comparison.exact)

    def _p_text(self, p: float, family: int, *, exact: bool) -> str:
        text = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
        if family > 1:
            text += " adjusted"
        return text if exact else text + ", from random sign patterns"

    def _margin(self) -> str:
        return f"{self._amount(self.report.margin or 0.0, unit=True)}"

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

    def _conclusion(self, variant: Variant, conclusion: Conclusion) -> str:
        lacks, adds, swapped = self._parts(variant)
        better = conclusion.verdict == "better"
        if bool(lacks) + bool(adds) + bool(swapped) != 1:
            return f"it is {'better' if better else 'worse'} than the baseline"
        if swapped:
            side = [new if better else old for old, new in swapped]
            return f"{listed(side)} {'does' if len(side) == 1 else 'do'} better here"
        one = len(lacks or adds) == 1
        if better == bool(adds):
            return "it contributes" if one else "they contribute"
        return f"the setup is better without {'it' if one else 'them'}"


def _subject(effect: Effect) -> str:
    """The name of an effect at the beginning of a sentence."""
    if effect.aliases:
        own, *others = " x ".join(effect.factors), *effect.alias_names
        return f"The sum of {own} and its alias{'es' if len(others) > 1 else ''} {listed(others)}"
    return effect.name if len(effect.factors) == 1 else f"The interaction {effect.name}"
