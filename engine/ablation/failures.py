"""What failed runs say: a failed run counts as worse than any finished one.

A variant whose runs fail where those of the baseline finish must not be judged by its survivors. If any run of a comparison
failed, all of its pairs are ranked by the size of their difference, a pair of which one run failed above all others, and the
sign-flip test is made on the signed ranks. Two failed runs of one seed are a tie. Which pairs are ranked does not depend on the
labels within a pair, so the test keeps its level.

Source: Lachin, Worst-Rank Score Analysis with Informatively Missing Observations in Clinical Trials, Controlled Clinical Trials
20, 1999, doi:10.1016/S0197-2456(99)00022-7; McNemar, Note on the Sampling Error of the Difference between Correlated
Proportions, Psychometrika 12, 1947 (the test of failing or not, here exact).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

__all__ = ["Failures", "failures_of", "mcnemar", "signed_ranks"]

Values = Mapping[int, Fraction | None]
"""The value of each run of a variant, by seed; None for a failed run. Missing runs are not in it."""


@dataclass(frozen=True)
class Failures:
    """In how many pairs of runs which of them failed.

    Attributes:
        variant: Pairs in which only the run of the variant failed.
        baseline: Pairs in which only the run of the baseline failed.
        both: Pairs in which both failed.
        p: Two-sided p-value of McNemar's exact test of failing or not.
    """

    variant: int
    baseline: int
    both: int
    p: float


def failures_of(variant: Values, baseline: Values) -> Failures | None:
    """The failures in the pairs of two variants; None if no run of a pair failed."""
    pairs = [(variant[seed] is None, baseline[seed] is None) for seed in variant if seed in baseline]
    ours, theirs, both = (pairs.count(which) for which in ((True, False), (False, True), (True, True)))
    return Failures(ours, theirs, both, mcnemar(ours, theirs)) if ours or theirs or both else None


def mcnemar(first: int, second: int) -> float:
    """The two-sided p-value of McNemar's exact test.

    Args:
        first: Number of pairs in which only the first failed.
        second: Number of pairs in which only the second failed.

    Example:
        >>> mcnemar(5, 0), mcnemar(3, 2)
        (0.0625, 1.0)
    """
    n = first + second
    tail = sum(math.comb(n, k) for k in range(min(first, second) + 1))
    return min(1.0, tail / 2 ** (n - 1)) if n else 1.0


def signed_ranks(variant: Values, baseline: Values, mode: Literal["min", "max"]) -> dict[int, Fraction]:
    """The signed rank of each pair, by seed: a failed run is worse than any finished one, and two failed runs tie.

    Args:
        variant: Values of the variant.
        baseline: Values of the baseline.
        mode: Whether smaller or larger values are better. A rank is positive if the variant's value is larger, or counts as it.

    Returns:
        Ranks of the absolute differences, averaged over ties, with the sign of the difference; 0 for a difference of 0.

    Example:
        >>> baseline = {0: Fraction(1), 1: Fraction(2), 2: Fraction(2)}
        >>> ranks = signed_ranks({0: Fraction(3), 1: None, 2: Fraction(1)}, baseline, "max")
        >>> {seed: int(rank) for seed, rank in ranks.items()}
        {0: 2, 1: -3, 2: -1}
    """
    worst = -1 if mode == "max" else 1
    # The first number is that of a failure, which comes before any difference of values.
    differences: dict[int, tuple[int, Fraction]] = {}
    for seed, value in variant.items():
        if seed in baseline:
            other = baseline[seed]
            if value is not None and other is not None:
                differences[seed] = 0, value - other
            else:
                differences[seed] = worst * ((value is None) - (other is None)), Fraction(0)
    places: dict[tuple[int, Fraction], list[int]] = {}
    for place, size in enumerate(sorted((abs(one), abs(other)) for one, other in differences.values()), 1):
        places.setdefault(size, []).append(place)
    ranks = {size: Fraction(sum(those), len(those)) for size, those in places.items()}
    return {seed: ranks[abs(one), abs(other)] * _sign(one or other) for seed, (one, other) in differences.items()}


def _sign(number: int | Fraction) -> int:
    return (number > 0) - (number < 0)
