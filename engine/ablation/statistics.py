"""What paired runs show: intervals and exact tests of differences, corrections for many of them, and factorial effects.

Runs of two variants with one seed share initialisation, data order and dropout, so that what is examined is the difference
within each seed. There are few of them, often 5 to 10, which decides what is used here:

- *Interval*: Student's t of the paired differences. A percentile bootstrap is not used: it has the quantiles of a normal
  distribution and a spread that is too small by sqrt((n - 1) / n). What was to cover 95 % covered 78 to 84 % with 5 seeds, where
  Student-t covered 95 to 98 %, and 88 % where the differences themselves are as skewed as an exponential distribution
  (tests/campaigns/calibration.py, results beside it).
- *Test*: the exact sign-flip test. If a variant makes no difference, both signs of each difference are equally likely. Nothing
  else is assumed: the level holds for any distribution that is symmetric around 0. Differences with a mean of 0 that are skewed
  break that: with exponential ones, 8 to 12 seeds found something at 0.05 in 10 % of studies, in 12 to 16 % in a family of five.
- *Correction*: Holm, which holds under any dependence; the comparisons of a study share their baseline.

Source: Fisher, The Design of Experiments, 1935, section 21 (the test); Holm, A Simple Sequentially Rejective Multiple Test
Procedure, Scandinavian Journal of Statistics 6, 1979; Hesterberg, What Teachers Should Know About the Bootstrap, The American
Statistician 69(4), 2015, doi:10.1080/00031305.2015.1089789 (why the percentile interval is too short); Box, Hunter and Hunter,
Statistics for Experimenters, 2005, chapter 5 (effects).
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product

from .results import Result, Variant

__all__ = ["Comparison", "Effect", "compare", "effects", "exact", "fewest_seeds", "holm"]

EXACT_UP_TO = 20
"""The most differences of which all patterns of signs are counted."""

FLIPS = 2**16
"""How many patterns of signs are drawn where there are too many to count."""

LARGEST_DENOMINATOR = 10**6


@dataclass(frozen=True)
class Comparison:
    """Paired differences of two variants, and what they show.

    Attributes:
        n: how many differences there are.
        mean: of the differences; NaN if there is none.
        sd: their standard deviation (n - 1); NaN below two.
        low: lower end of the Student-t interval of the mean; NaN below two differences, and if all of them are equal: with a
            standard deviation of 0 its width of 0 would claim a certainty that n equal numbers do not give.
        high: upper end, likewise.
        p: of the two-sided sign-flip test: the share of all patterns of signs, the observed one among them, whose sum is at
            least as far from 0. It is 1 below two differences. See :attr:`exact`.
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
        """Whether all patterns of signs were counted (up to 20 differences), and not 65,536 drawn by chance."""
        return self.n <= EXACT_UP_TO


def exact(value: float | Fraction) -> Fraction:
    """The fraction that a number stands for, so that sums of such numbers tie exactly when they should.

    An accuracy is a fraction, such as 279/360, of which a float is the nearest neighbour; with floats, whether two sums are equal
    depends on how each was rounded. The fraction with a denominator of at most 1,000,000 that rounds to this very float is taken;
    there is at most one. If there is none, the float itself is, as the binary fraction it is. No tolerance is involved.

    Args:
        value: any finite number.

    Errors:
        ValueError: it is infinite or NaN.

    Example:
        >>> 0.1 + 0.2 == 0.3, exact(0.1) + exact(0.2) == exact(0.3), exact(279 / 360)
        (False, True, Fraction(31, 40))
    """
    if isinstance(value, Fraction):
        return value
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"exact(value={value!r}): it has to be finite; a run that came to this has failed")
    itself = Fraction(value)
    # Two fractions with denominators up to q are at least 1 / q**2 apart, and here that is more than one float apart.
    limit = min(LARGEST_DENOMINATOR, int(math.ulp(value) ** -0.5 / 2))
    if limit < 1:
        return itself
    simple = itself.limit_denominator(limit)
    return simple if float(simple) == value else itself


def compare(differences: Sequence[float | Fraction], *, level: float = 0.95) -> Comparison:
    """What paired differences show: mean, Student-t interval, exact sign-flip test and effect size.

    Up to 20 differences all 2**n patterns of signs are counted. Above that, 65,536 patterns are drawn from a generator that is
    seeded the same way each time, and p is (1 + those as far from 0) / 65,537, which keeps the level (Phipson and Smyth, 2010).

    Two sums tie if they are equal as fractions (:func:`exact`), and a tie counts as being as far from 0. Differences of
    accuracies tie best when they are made of fractions too: ``exact(first) - exact(second)``, since the difference of two floats
    was rounded already. The rule keeps the level whatever it ties, as it treats d and -d alike.

    Args:
        differences: one for each seed, in the unit of the metric.
        level: of the interval, between 0 and 1.

    Errors:
        ValueError: a difference is infinite or NaN, or the level is not between 0 and 1.

    Example:
        >>> found = compare([0.3, 0.1, 0.2, 0.4, 0.2, 0.3])
        >>> f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f}), p = {found.p}"
        '0.25 (0.14 to 0.36), p = 0.03125'
    """
    if not 0 < level < 1:
        raise ValueError(f"compare(level={level!r}): it has to be between 0 and 1, such as 0.95")
    fractions = [exact(difference) for difference in differences]
    n, nan = len(fractions), math.nan
    if n < 2:
        return Comparison(n=n, mean=float(fractions[0]) if n else nan, sd=nan, low=nan, high=nan, p=1.0, effect=None)
    mean = float(sum(fractions) / n)
    p = _sign_flip_p(fractions)
    if all(one == fractions[0] for one in fractions):
        return Comparison(n=n, mean=mean, sd=0.0, low=nan, high=nan, p=p, effect=None)
    sd = float(statistics.stdev(fractions))
    half = _t_quantile(level, n - 1) * sd / math.sqrt(n)
    return Comparison(n=n, mean=mean, sd=sd, low=mean - half, high=mean + half, p=p, effect=mean / sd)


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family of tests, by Holm's step-down procedure, in the order in which they are given.

    Those at most alpha can be rejected together, with a chance of at most alpha that any one of them is rejected wrongly, however
    the tests depend on each other. A comparison that was planned and could not be made belongs to the family, with p = 1.

    Errors:
        ValueError: a p-value is not between 0 and 1.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    for one in p:
        if not 0 <= one <= 1:
            raise ValueError(f"holm(p={one!r}): it has to be between 0 and 1; take 1 for a test that could not be made")
    adjusted = [1.0] * len(p)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda index: p[index])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = largest
    return adjusted


def fewest_seeds(comparisons: int, alpha: float = 0.05) -> int:
    """The fewest seeds with which the exact sign-flip test, after Holm, can reach alpha at all.

    The smallest p of n seeds is 2 / 2**n: all differences have the same sign. Holm multiplies the smallest of a family by its
    size. With fewer seeds no result whatever can be significant; with as many, it takes one in which all seeds agree.

    Args:
        comparisons: how many there are in the family.
        alpha: the level that the adjusted p has to reach.

    Errors:
        ValueError: an argument is out of range, or no number of seeds with an exact test is enough.

    Example:
        >>> fewest_seeds(1), fewest_seeds(5)
        (6, 8)
    """
    if comparisons < 1:
        raise ValueError(f"fewest_seeds(comparisons={comparisons!r}): it has to be at least 1")
    if not 0 < alpha < 1:
        raise ValueError(f"fewest_seeds(alpha={alpha!r}): it has to be between 0 and 1, such as 0.05")
    for n in range(2, EXACT_UP_TO + 1):
        if comparisons * 2 ** (1 - n) <= alpha:
            return n
    raise ValueError(
        f"fewest_seeds(comparisons={comparisons!r}, alpha={alpha!r}): the smallest p of {EXACT_UP_TO} seeds is "
        f"{2 ** (1 - EXACT_UP_TO):.2g}, which is not enough; compare less, or allow a larger alpha"
    )


@dataclass(frozen=True)
class Effect:
    """A main effect or an interaction of a factorial design.

    Attributes:
        factors: the names of its factors: one for a main effect, several for an interaction.
        comparison: of the contrasts, one for each seed.
        adjusted: p after Holm over all effects that were asked for together.
        contrasts: the contrast of each seed, by the seed.
        left_out: the seeds without a contrast, since a run of theirs failed or is missing.
    """

    factors: tuple[str, ...]
    comparison: Comparison
    adjusted: float
    contrasts: dict[int, float]
    left_out: tuple[int, ...]

    @property
    def name(self) -> str:
        """Such as "ema" or "ema x mixup"."""
        return " x ".join(self.factors)


def effects(
    results: Sequence[Result],
    factors: Sequence[str],
    order: int = 2,
    *,
    variants: Sequence[Variant],
    level: float = 0.95,
) -> list[Effect]:
    """Main effects and interactions of a full factorial design, as contrasts that are paired within each seed.

    The main effect of a factor is the mean of the runs with it less the mean of those without it. An interaction of two is half
    of what the effect of one changes by when the other is switched on, and so on for more: with k factors in the design, every
    effect is ``2**(1 - k) * sum(sign * value)`` over the 2**k runs of a seed, so that all have the same standard error. A seed
    needs all of its runs to finish; those that do not have them are named in ``left_out``.

    Args:
        results: of all variants and seeds.
        factors: whose effects are wanted; all the factors of the design.
        order: of how many factors interactions are looked at; 1: main effects only.
        variants: the cells of the design; ``Variant.level`` says which factors are on.
        level: of the intervals.

    Errors:
        ValueError: the variants are not a full factorial design of these factors, or an argument is out of range.
    """
    factors = list(factors)
    if not factors or len(set(factors)) != len(factors):
        raise ValueError(f"effects(factors={factors!r}): they have to be different names, at least one")
    if not 1 <= order <= len(factors):
        raise ValueError(f"effects(order={order!r}): it has to be between 1 and {len(factors)}, the number of factors")
    cells = _cells(factors, variants)
    values = _finished(results)
    seeds = sorted({result.seed for result in results if result.variant in cells.values()})
    whole = [seed for seed in seeds if all((name, seed) in values for name in cells.values())]
    left_out = tuple(seed for seed in seeds if seed not in whole)
    of_factors = [those for size in range(1, order + 1) for those in combinations(range(len(factors)), size)]
    share = Fraction(2, len(cells))
    comparisons = []
    of_seeds = []
    for those in of_factors:
        contrasts = []
        for seed in whole:
            signed = (
                values[name, seed] * math.prod(1 if on[index] else -1 for index in those) for on, name in cells.items()
            )
            contrasts.append(share * sum(signed))
        comparisons.append(compare(contrasts, level=level))
        of_seeds.append({seed: float(contrast) for seed, contrast in zip(whole, contrasts, strict=True)})
    adjusted = holm([comparison.p for comparison in comparisons])
    return [
        Effect(tuple(factors[index] for index in those), comparison, one, contrasts_of, left_out)
        for those, comparison, one, contrasts_of in zip(of_factors, comparisons, adjusted, of_seeds, strict=True)
    ]


def _cells(factors: Sequence[str], variants: Sequence[Variant]) -> dict[tuple[bool, ...], str]:
    """The name of the variant for each combination of factors that are on."""
    cells: dict[tuple[bool, ...], str] = {}
    for variant in variants:
        on = dict(variant.level)
        if set(on) != set(factors):
            raise ValueError(
                f"effects(factors={list(factors)!r}): the factors of variant {variant.name!r} are {sorted(on)}; "
                "give all factors of the design, and its cells only"
            )
        combination = tuple(on[factor] for factor in factors)
        if combination in cells:
            raise ValueError(f"effects(variants=...): {cells[combination]!r} and {variant.name!r} are the same cell")
        cells[combination] = variant.name
    for combination in product((False, True), repeat=len(factors)):
        if combination not in cells:
            on_names = [factor for factor, on_ in zip(factors, combination, strict=True) if on_]
            raise ValueError(f"effects(variants=...): not a full factorial design, no variant has only {on_names} on")
    return cells


def _finished(results: Sequence[Result]) -> dict[tuple[str, int], Fraction]:
    """The values of the runs that came to a number, by variant and seed."""
    return {
        (result.variant, result.seed): exact(result.value)
        for result in results
        if result.error is None and result.value is not None and math.isfinite(result.value)
    }


@lru_cache(maxsize=256)
def _t_quantile(level: float, degrees: int) -> float:
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("the statistics of a study need SciPy: pip install 'signalfire[ablation]'") from error
    return float(stats.t.ppf((1 + level) / 2, degrees))


def _sign_flip_p(fractions: Sequence[Fraction]) -> float:
    """The two-sided p of two differences or more, in whole numbers throughout: no sum is rounded."""
    scale = math.lcm(*(one.denominator for one in fractions))
    numbers = [int(one * scale) for one in fractions]
    observed = abs(sum(numbers))
    if observed == 0:
        return 1.0
    if len(numbers) > EXACT_UP_TO:
        return _drawn_p(numbers, observed)
    # Each pattern is one of the first half and one of the second: those of the second that go with one of the first are found
    # in order, so that 2**(n / 2) sums stand for 2**n.
    half = len(numbers) // 2
    second = sorted(_signed_sums(numbers[half:]))
    count = sum(
        len(second) - bisect_left(second, observed - one) + bisect_right(second, -observed - one)
        for one in _signed_sums(numbers[:half])
    )
    return float(count / 2 ** len(numbers))


def _signed_sums(numbers: Sequence[int]) -> list[int]:
    """The sums of all patterns of signs; that at index i has the k-th number positive if the k-th bit of i is set."""
    sums = [0]
    for number in numbers:
        sums = [one - number for one in sums] + [one + number for one in sums]
    return sums


def _drawn_p(numbers: Sequence[int], observed: int) -> float:
    tables = [_signed_sums(numbers[start : start + 8]) for start in range(0, len(numbers), 8)]
    generator = random.Random(0)
    count = 0
    for _ in range(FLIPS):
        count += abs(sum(table[generator.randrange(len(table))] for table in tables)) >= observed
    return (1 + count) / (1 + FLIPS)
