"""Statistics of paired runs: intervals and exact tests of differences, corrections for multiple tests, factorial effects.

Runs of two variants with the same seed share initialization, data order and dropout, so the difference within each seed is
analysed. Seeds are few, often 5 to 10, which determines the methods:

- *Interval*: Student's t of the paired differences. A percentile bootstrap is not used for them: it has the quantiles of a normal
  distribution and a spread that is too small by sqrt((n - 1) / n). Its 95 % intervals covered 77 to 85 % with 5 seeds, where
  those of Student-t covered 95 to 97 %, and 87 % where the differences are as skewed as an exponential distribution
  (tests/campaigns/calibration.py, with the results beside it).
- *Test*: the exact sign-flip test. If a variant has no effect, both signs of each difference are equally likely. Nothing
  else is assumed: the level holds for any distribution that is symmetric around 0. It does not for skewed differences with a
  mean of 0: with exponential ones and 8 to 12 seeds, 10 % of tests were false positives at 0.05, 16 to 21 % of reports on
  five variants had a wrong verdict, and all five intervals held in 78 to 80 %. For symmetric ones these were 3 to 6 % and 95 to
  97 %.
- *Correction*: the step-down test over joint sign flips (:mod:`signalfire.ablation.joint`). The comparisons of a study depend on
  each other, as they share their baseline and seeds; Holm, which bounds any dependence, finds less: with 8 seeds, one real
  difference of 1.5 standard deviations among five is found in 57 % of studies by Holm and in more than 70 % so.
- *Failures*: a failed run is worse than any finished one (:mod:`signalfire.ablation.failures`).

Source: Fisher, The Design of Experiments, 1935, section 21 (the test); Holm, A Simple Sequentially Rejective Multiple Test
Procedure, Scandinavian Journal of Statistics 6, 1979; Hesterberg, What Teachers Should Know About the Bootstrap, The American
Statistician 69(4), 2015, doi:10.1080/00031305.2015.1089789 (why the percentile interval is too short); Box, Hunter and Hunter,
Statistics for Experimenters, 2005, chapter 5 (effects).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product

from .factors import contrasts_of, factors_of, has_levels, level_contrasts, subsets
from .joint import EXACT_UP_TO, intervals, step_down
from .results import Result, Variant, finished_value

__all__ = [
    "Comparison",
    "Effect",
    "compare",
    "contributions",
    "effects",
    "exact",
    "fewest_seeds",
    "finished_values",
    "holm",
    "make_effects",
    "mean_of",
    "sd_of",
    "seeds_needed",
    "split_seeds",
]

LARGEST_DENOMINATOR = 10**6


@dataclass(frozen=True)
class Comparison:
    """The statistics of the paired differences of two variants.

    Attributes:
        n: Number of differences.
        mean: Mean of the differences; NaN without any.
        sd: Their standard deviation (n - 1); NaN for fewer than two.
        low: Lower end of the Student-t interval of the mean; NaN for fewer than two differences, and if all are equal: an
            interval of width 0 would claim a certainty that n equal numbers do not give.
        high: Upper end of the interval, likewise.
        p: p-value of the two-sided sign-flip test: the fraction of all sign patterns, including the observed one, whose sum is at
            least as far from 0. It is 1 for fewer than two differences. See :attr:`exact`.
        effect: Cohen's d_z, the mean divided by the standard deviation; None if that is 0 or NaN.
    """

    n: int
    mean: float
    sd: float
    low: float
    high: float
    p: float
    effect: float | None

    @property
    def exact(self) -> bool:
        """Whether all sign patterns were counted (up to 20 differences) instead of 65,536 random ones."""
        return self.n <= EXACT_UP_TO


def exact(value: float | Fraction) -> Fraction:
    """The fraction that a float was rounded from, so that equal sums of such numbers tie exactly.

    An accuracy is a fraction, such as 279/360, and a float is only its nearest approximation; with floats, rounding decides
    whether two sums are equal. This returns the fraction with a denominator of at most 1,000,000 that rounds to exactly this
    float; there is at most one. If there is none, it returns the exact value of the float. No tolerance is involved.

    Args:
        value: Any finite number.

    Raises:
        ValueError: if it is infinite or NaN.

    Example:
        >>> 0.1 + 0.2 == 0.3, exact(0.1) + exact(0.2) == exact(0.3), exact(279 / 360)
        (False, True, Fraction(31, 40))
    """
    if isinstance(value, Fraction):
        return value
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(
            f"exact(value={value!r}): expected a finite number; a run whose metric is not finite counts as failed"
        )
    itself = Fraction(value)
    # Two fractions with denominators up to q are at least 1 / q**2 apart, and here that is more than one float apart.
    limit = min(LARGEST_DENOMINATOR, int(math.ulp(value) ** -0.5 / 2))
    if limit < 1:
        return itself
    simple = itself.limit_denominator(limit)
    return simple if float(simple) == value else itself


def compare(differences: Sequence[float | Fraction], *, level: float = 0.95) -> Comparison:
    """Analyse paired differences: mean, Student-t interval, exact sign-flip test and effect size.

    Up to 20 differences, all 2**n sign patterns are counted. Above that, 65,536 patterns are drawn from a generator with a fixed
    seed, and p is (1 + number at least as far from 0) / 65,537, which keeps the level (Phipson and Smyth, 2010).

    Two sums tie if they are equal as fractions (:func:`exact`), and a tie counts as being as far from 0. For accuracies, pass
    differences of fractions, ``exact(first) - exact(second)``: the difference of two floats is already rounded. This rule
    keeps the level whichever sums tie, because it treats d and -d alike.

    Args:
        differences: One difference per seed, in the unit of the metric.
        level: Confidence level of the interval, between 0 and 1.

    Raises:
        ValueError: if a difference is infinite or NaN, or the level is not between 0 and 1.

    Example:
        >>> found = compare([0.3, 0.1, 0.2, 0.4, 0.2, 0.3])
        >>> f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f}), p = {found.p}"
        '0.25 (0.14 to 0.36), p = 0.03125'
    """
    if not 0 < level < 1:
        raise ValueError(f"compare(level={level!r}): expected a number between 0 and 1, such as 0.95")
    fractions = [exact(difference) for difference in differences]
    n, nan = len(fractions), math.nan
    if n < 2:
        return Comparison(n=n, mean=float(fractions[0]) if n else nan, sd=nan, low=nan, high=nan, p=1.0, effect=None)
    mean = float(sum(fractions) / n)
    p = step_down([dict(enumerate(fractions))])[0]
    if all(one == fractions[0] for one in fractions):
        return Comparison(n=n, mean=mean, sd=0.0, low=nan, high=nan, p=p, effect=None)
    sd = float(statistics.stdev(fractions))
    half = _t_quantile(level, n - 1) * sd / math.sqrt(n)
    return Comparison(n=n, mean=mean, sd=sd, low=mean - half, high=mean + half, p=p, effect=mean / sd)


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family of tests by Holm's step-down procedure, in the given order.

    Rejecting all tests with an adjusted p of at most alpha keeps the probability of any false rejection at most alpha, however
    the tests depend on each other. A planned comparison that could not be made belongs to the family, with p = 1.

    Raises:
        ValueError: if a p-value is not between 0 and 1.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    for one in p:
        if not 0 <= one <= 1:
            raise ValueError(
                f"holm(p={one!r}): expected a number between 0 and 1; use 1 for a test that could not be run"
            )
    adjusted = [1.0] * len(p)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda index: p[index])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = largest
    return adjusted


def fewest_seeds(comparisons: int, alpha: float = 0.05) -> int:
    """The minimum number of seeds with which the exact sign-flip test, after Holm's correction, can reach alpha.

    The smallest p-value of n seeds is 2 / 2**n: all differences have the same sign. Holm multiplies the smallest p-value of a
    family by its size. With fewer seeds no result can be significant; with exactly this many, all seeds must agree.

    Args:
        comparisons: Number of comparisons in the family.
        alpha: Significance level for the adjusted p-value.

    Raises:
        ValueError: if an argument is out of range, or no number of seeds with an exact test is enough.

    Example:
        >>> fewest_seeds(1), fewest_seeds(5)
        (6, 8)
    """
    if comparisons < 1:
        raise ValueError(f"fewest_seeds(comparisons={comparisons!r}): expected 1 or more")
    if not 0 < alpha < 1:
        raise ValueError(f"fewest_seeds(alpha={alpha!r}): expected a number between 0 and 1, such as 0.05")
    for n in range(2, EXACT_UP_TO + 1):
        if comparisons * 2 ** (1 - n) <= alpha:
            return n
    raise ValueError(
        f"fewest_seeds(comparisons={comparisons!r}, alpha={alpha!r}): the smallest possible p with {EXACT_UP_TO} "
        f"seeds is {2 ** (1 - EXACT_UP_TO):.2g}, which is not small enough; compare fewer variants, or use "
        "a larger alpha"
    )


def seeds_needed(comparisons: int, alpha: float) -> int | None:
    """As `fewest_seeds`; None if no number of seeds is enough."""
    try:
        return fewest_seeds(comparisons, alpha)
    except ValueError:
        return None


@dataclass(frozen=True)
class Effect:
    """A main effect or an interaction of a factorial design.

    Attributes:
        factors: Names of its factors: one for a main effect, two or more for an interaction.
        comparison: Statistics of the contrasts, one per seed.
        adjusted: p-value of the step-down test over all effects of the same call.
        low: Lower end of the simultaneous interval over all effects of the same call.
        high: Upper end of it.
        contrasts: Contrast of each seed, by seed.
        left_out: Seeds without a contrast, because one of their runs failed or is missing.
        aliases: In a fraction of a factorial design, the factors of each effect that is confounded with this one: the
            estimates are those of their sum.
    """

    factors: tuple[str, ...]
    comparison: Comparison
    adjusted: float
    low: float
    high: float
    contrasts: dict[int, float]
    left_out: tuple[int, ...]
    aliases: tuple[tuple[str, ...], ...] = ()

    @property
    def name(self) -> str:
        """Name of the effect, such as "ema" or "ema x mixup"; with aliases, "ema + mixup x swa"."""
        return " + ".join([" x ".join(self.factors), *self.alias_names])

    @property
    def alias_names(self) -> list[str]:
        """Names of the aliases of up to two factors, or else of the shortest; of longer ones, their number."""
        if not self.aliases:
            return []
        shown = [one for one in self.aliases if len(one) <= max(2, len(self.aliases[0]))]
        more = len(self.aliases) - len(shown)
        return [*(" x ".join(one) for one in shown), *([f"{more} of more factors"] if more else [])]


def effects(
    results: Sequence[Result],
    factors: Sequence[str],
    order: int = 2,
    *,
    variants: Sequence[Variant],
    level: float = 0.95,
) -> list[Effect]:
    """Main effects and interactions of a full factorial design, as contrasts paired within each seed.

    The main effect of a factor is the mean of the runs with it minus the mean of those without it. An interaction of two factors
    is half the change in the effect of one when the other is switched on, and likewise for more: with k factors in the design,
    every effect is ``2**(1 - k) * sum(sign * value)`` over the 2**k runs of a seed, so that all have the same standard error. For
    factors with named levels (`Variants`), the main effect of a level is its mean minus that of the baseline's level, and an
    interaction is the difference of such differences. A
    seed counts only if all of its runs finished; the others are listed in ``left_out``.

    Args:
        results: Results of all variants and seeds.
        factors: Names of all factors of the design.
        order: Maximum number of factors in an interaction; 1 for main effects only.
        variants: Cells of the design, the baseline first; ``Variant.level`` holds which factors are on, or their levels.
        level: Confidence level of the intervals.

    Raises:
        ValueError: if the variants are not a full factorial design of these factors, or an argument is out of range.
    """
    factors = list(factors)
    if not factors or len(set(factors)) != len(factors):
        raise ValueError(f"effects(factors={factors!r}): expected at least one name, and each name only once")
    if not 1 <= order <= len(factors):
        raise ValueError(f"effects(order={order!r}): expected 1 to {len(factors)}, the number of factors")
    values = finished_values(results)
    if has_levels(variants):
        return _effects_of_levels(results, values, factors, order, variants, level)
    cells = _cells(factors, variants)
    complete, left_out = split_seeds(results, cells.values(), values)
    of_factors = subsets(len(factors), order)
    contrasts = contrasts_of([_signs(cells, places) for places in of_factors], values, complete)
    names = [tuple(factors[place] for place in places) for places in of_factors]
    return make_effects(names, contrasts, left_out, level)


def _signs(cells: Mapping[tuple[bool, ...], str], places: Sequence[int]) -> dict[str, Fraction]:
    """The weight of each run in the contrast of the factors at these places."""
    share = Fraction(2, len(cells))
    return {name: share * math.prod(1 if on[place] else -1 for place in places) for on, name in cells.items()}


def contributions(
    results: Sequence[Result], weights: Mapping[str, Mapping[str, Fraction]], level: float = 0.95
) -> list[Effect]:
    """Weighted sums over variants, paired within each seed, as effects of one family.

    Args:
        results: Results of the variants.
        weights: Weight of each variant, by the name of the effect and that of the variant.
        level: Confidence level of the intervals.

    Raises:
        ValueError: if a variant has no results.
    """
    values = finished_values(results)
    there = {result.variant for result in results}
    needed = sorted({name for those in weights.values() for name in those})
    if missing := [name for name in needed if name not in there]:
        raise ValueError(
            f"contributions(): there are no runs of {', '.join(missing)}; pass the design that produced these results"
        )
    complete, left_out = split_seeds(results, needed, values)
    contrasts = contrasts_of(weights.values(), values, complete)
    return make_effects([(name,) for name in weights], contrasts, left_out, level)


def _effects_of_levels(
    results: Sequence[Result],
    values: Mapping[tuple[str, int], Fraction],
    factors: Sequence[str],
    order: int,
    variants: Sequence[Variant],
    level: float,
) -> list[Effect]:
    if any(factors_of(variant) != factors for variant in variants):
        raise ValueError(
            f"effects(factors={list(factors)!r}): some variants have different factors; pass all factors of the "
            "design, and no variants from other designs"
        )
    complete, left_out = split_seeds(results, [variant.name for variant in variants], values)
    return make_effects(*level_contrasts(values, variants, complete, order), left_out, level)


def make_effects(
    names: Sequence[tuple[str, ...]],
    contrasts: Sequence[Mapping[int, Fraction]],
    left_out: tuple[int, ...],
    level: float,
) -> list[Effect]:
    """The effects of a family, from the contrasts of each by seed."""
    adjusted = step_down(contrasts)
    between = intervals(contrasts, level)
    return [
        Effect(
            name,
            compare(list(own.values()), level=level),
            p,
            *interval,
            {seed: float(contrast) for seed, contrast in own.items()},
            left_out,
        )
        for name, own, p, interval in zip(names, contrasts, adjusted, between, strict=True)
    ]


def _cells(factors: Sequence[str], variants: Sequence[Variant]) -> dict[tuple[bool, ...], str]:
    """The name of the variant for each combination of factor levels."""
    cells: dict[tuple[bool, ...], str] = {}
    for variant in variants:
        on = dict(variant.level)
        if set(on) != set(factors):
            raise ValueError(
                f"effects(factors={list(factors)!r}): the factors of variant {variant.name!r} are {sorted(on)}; "
                "pass all factors of the design, and no variants from other designs"
            )
        combination = tuple(on[factor] is True for factor in factors)
        if combination in cells:
            raise ValueError(
                f"effects(variants=...): {cells[combination]!r} and {variant.name!r} enable the same factors; "
                "pass only one of them"
            )
        cells[combination] = variant.name
    for combination in product((False, True), repeat=len(factors)):
        if combination not in cells:
            on_names = [factor for factor, on_ in zip(factors, combination, strict=True) if on_]
            raise ValueError(
                "effects(variants=...): this is not a full factorial design, because no variant enables "
                + (f"only {on_names}" if on_names else "none of the factors")
            )
    return cells


def finished_values(results: Sequence[Result]) -> dict[tuple[str, int], Fraction]:
    """The values of the finished runs, by variant and seed."""
    values = {(result.variant, result.seed): finished_value(result) for result in results}
    return {run: exact(value) for run, value in values.items() if value is not None}


def split_seeds(
    results: Sequence[Result], variants: Collection[str], values: Mapping[tuple[str, int], Fraction]
) -> tuple[list[int], tuple[int, ...]]:
    """The seeds of which the runs of all these variants finished, and the others."""
    seeds = sorted({result.seed for result in results if result.variant in variants})
    complete = [seed for seed in seeds if all((name, seed) in values for name in variants)]
    return complete, tuple(seed for seed in seeds if seed not in complete)


def mean_of(values: Collection[float]) -> float:
    """The mean; NaN without values."""
    return statistics.fmean(values) if values else math.nan


def sd_of(values: Collection[float]) -> float:
    """The standard deviation; NaN for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


@lru_cache(maxsize=256)
def _t_quantile(level: float, degrees: int) -> float:
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("the statistics of a study need SciPy: pip install 'signalfire[ablation]'") from error
    return float(stats.t.ppf((1 + level) / 2, degrees))
