"""Tests and intervals of a family of paired differences, from the joint distribution of their sign flips.

All comparisons of a study share its seeds. If no variant has an effect, swapping the labels of all runs of one seed changes
nothing, so the signs of all differences of a seed flip together. The joint distribution of the statistics over all 2**n sign
patterns accounts for how the comparisons depend on each other, which Holm's correction has to bound.

- *Statistic*: the mean divided by the root mean square, times the root of n. It is a monotone function of Student's t, but flips
  leave its denominator unchanged.
- *Adjusted p*: step-down maxT. The largest statistic is compared with the maximum over all comparisons, the next one with the
  maximum over those that remain. The probability of any false rejection is at most alpha, for any number of real effects.
- *Interval*: the values that the single-step test does not reject. For a value of one effect, its own differences are shifted
  by it and those of the others by their means, so that the critical value is that of the family whatever the other effects are.

Source: Westfall and Young, Resampling-Based Multiple Testing, 1993, chapter 2 (step-down); Romano and Wolf, Exact and
Approximate Stepdown Methods for Multiple Hypothesis Testing, JASA 100, 2005, doi:10.1198/016214504000000539.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["EXACT_UP_TO", "FLIPS", "Differences", "flipped_sums", "integers", "intervals", "smallest_p", "step_down"]

EXACT_UP_TO = 20
"""Maximum number of differences for which all sign patterns are counted."""

FLIPS = 2**16
"""Number of random sign patterns where there are too many to count."""

Differences = Mapping[int, Fraction]
"""The differences of one comparison, by seed."""

Floats = npt.NDArray[np.float64]

_EXACT = 2**53  # integers up to here are floats without rounding


def smallest_p(pairs: int) -> float:
    """The smallest p that the sign-flip test can reach: all differences have the same sign.

    The step-down test reaches it for any number of comparisons, at best; Holm's correction multiplies it by their number.

    Args:
        pairs: Number of differences.

    Example:
        >>> smallest_p(5), smallest_p(6)
        (0.0625, 0.03125)
    """
    if pairs > EXACT_UP_TO:
        return 1 / (1 + FLIPS)
    return min(1.0, 2.0 ** (1 - pairs))


def step_down(family: Sequence[Differences]) -> list[float]:
    """The adjusted p-value of each comparison by the step-down test over joint sign flips.

    Up to 20 seeds, all sign patterns are counted, and statistics tie if they are equal as fractions. Above that, 65,536 random
    patterns and the observed one are. A comparison without a difference other than 0 has p = 1.

    Args:
        family: The differences of each comparison, by seed; seeds may be missing.

    Example:
        >>> rows = [3, 1, 2, 4, 2, 3], [1, -1, 2, 0, 1, -2]
        >>> step_down([{seed: Fraction(value) for seed, value in enumerate(row)} for row in rows])
        [0.03125, 1.0]
    """
    numbers = integers(family)
    observed = [abs(sum(row)) for row in numbers]
    squares = [sum(number * number for number in row) for row in numbers]
    tested = [place for place, square in enumerate(squares) if square]
    order = sorted(tested, key=lambda place: Fraction(observed[place] ** 2, squares[place]), reverse=True)
    adjusted = [1.0] * len(numbers)
    if not order:
        return adjusted
    sums = _Sums([numbers[place] for place in order])
    largest = 0.0
    for rank, place in enumerate(order):
        reached = np.zeros(sums.patterns, dtype=bool)
        for other in range(rank, len(order)):
            # |sum| / sqrt(squares) of the other is at least as large as that observed: in integers, so that ties are ties.
            bound = -(-(observed[place] ** 2) * squares[order[other]] // squares[place])
            reached |= sums.at_least(other, math.isqrt(bound - 1) + 1 if bound else 0)
        largest = max(largest, float(np.count_nonzero(reached)) / sums.patterns)
        adjusted[place] = largest
    return adjusted


def intervals(family: Sequence[Differences], level: float = 0.95) -> list[tuple[float, float]]:
    """Simultaneous intervals of the means: the values that the single-step test over joint sign flips does not reject.

    All of them hold together with the given probability. An interval is infinite if there are too few seeds to reject anything.

    Args:
        family: The differences of each comparison, by seed; seeds may be missing.
        level: Simultaneous confidence level.

    Returns:
        The ends of each interval, in the order of the family; NaN for a comparison without differences.

    Example:
        >>> values = [0.3, 0.1, 0.2, 0.4, 0.2, 0.3]
        >>> low, high = intervals([{seed: Fraction(value) for seed, value in enumerate(values)}])[0]
        >>> f"{low:.2f} to {high:.2f}"
        '0.10 to 0.40'
    """
    there, values = _arrays(family)
    counts = there.sum(1)
    means = values.sum(1) / np.maximum(counts, 1)
    residuals = np.where(there, values - means[:, None], 0.0)
    squares = (residuals**2).sum(1)
    flipped = flipped_sums(residuals)
    scaled = np.abs(flipped) / np.sqrt(np.where(squares > 0, squares, 1.0))[:, None]
    scaled[squares == 0] = 0.0
    allowed = math.floor((1 - level) * flipped.shape[1] * (1 + 1e-9))
    found = []
    for place, n in enumerate(counts):
        if n == 0:
            found.append((math.nan, math.nan))
            continue
        others = np.delete(scaled, place, 0)
        largest = others.max(0) if len(others) else np.zeros(flipped.shape[1])
        spread = math.sqrt(squares[place] / n)
        with np.errstate(divide="ignore", invalid="ignore"):
            # Patterns that reach the statistic of a shifted mean through another comparison, and through this one.
            reach = np.where(largest**2 < n, spread * largest / np.sqrt(n - largest**2), math.inf)
            minus = (n - flipped_sums(there[place : place + 1].astype(float))[0]) / 2  # seeds with a negative sign
            half = flipped[place] / 2
            sides = np.stack([-half / minus, half / (n - minus)])  # of the negative and of the positive ones
        sides[:, (minus == 0) | (minus == n)] = math.inf
        reach = np.maximum(reach, np.where(np.isinf(sides[0]), math.inf, 0.0))
        lower = -np.maximum(np.max(-sides, 0), reach)
        upper = np.maximum(np.max(sides, 0), reach)
        lower[np.isinf(reach)], upper[np.isinf(reach)] = -math.inf, math.inf
        low = np.partition(lower, allowed)[allowed]
        high = -np.partition(-upper, allowed)[allowed]
        found.append((float(means[place] + low), float(means[place] + high)))
    return found


def integers(family: Sequence[Differences]) -> list[list[int]]:
    """The differences of each comparison as integers of one scale, over all seeds of the family; 0 for a missing seed."""
    seeds = sorted({seed for differences in family for seed in differences})
    made = []
    for differences in family:
        scale = math.lcm(*(one.denominator for one in differences.values()))
        row = [int(differences[seed] * scale) if seed in differences else 0 for seed in seeds]
        divisor = math.gcd(*row) or 1
        made.append([number // divisor for number in row])
    return made


def flipped_sums(values: Floats) -> Floats:
    """The sums of each row under all joint sign patterns, of which one of each pair of opposite ones is enough.

    The first pattern changes no sign. At index i, the sign of column k + 1 is negative if bit k of i is set; that of the first
    column is never. Above 20 columns, the others are 65,536 random patterns.

    Args:
        values: Shape (rows, columns).

    Returns:
        Shape (rows, patterns).
    """
    rows, columns = values.shape
    if columns > EXACT_UP_TO:
        return values @ _random_signs(columns)
    sums: Floats = values[:, :1] if columns else np.zeros((rows, 1))
    for column in range(1, columns):
        one = values[:, column : column + 1]
        sums = np.concatenate([sums + one, sums - one], axis=1)
    return sums


@lru_cache(maxsize=2)
def _random_signs(columns: int) -> Floats:
    signs = np.random.default_rng(0).integers(0, 2, (columns, 1 + FLIPS)).astype(np.float64) * 2 - 1
    signs[:, 0] = 1.0
    return signs


def _arrays(family: Sequence[Differences]) -> tuple[npt.NDArray[np.bool_], Floats]:
    seeds = sorted({seed for differences in family for seed in differences})
    there = np.array([[seed in differences for seed in seeds] for differences in family], dtype=bool)
    values = np.array([[float(differences.get(seed, 0)) for seed in seeds] for differences in family], dtype=float)
    return there.reshape(len(family), len(seeds)), values.reshape(len(family), len(seeds))


class _Sums:
    """The absolute sums of integers under all sign patterns, compared without a rounding error."""

    def __init__(self, numbers: list[list[int]]) -> None:
        self._numbers = numbers
        self._totals = [sum(map(abs, row)) for row in numbers]
        self._shifts = [max(0, total.bit_length() - 1000) for total in self._totals]  # floats end at 2**1024
        values: Any = [
            [float(number >> shift) for number in row] for row, shift in zip(numbers, self._shifts, strict=True)
        ]
        self._sums = np.abs(flipped_sums(np.array(values, dtype=float)))
        self.patterns = self._sums.shape[1]

    def at_least(self, row: int, bound: int) -> npt.NDArray[np.bool_]:
        """Which patterns have an absolute sum of at least ``bound``."""
        sums, shift = self._sums[row], self._shifts[row]
        limit = float(bound >> shift)
        found: npt.NDArray[np.bool_] = sums >= limit
        if self._totals[row] >= _EXACT:  # floats are rounded: those that are close are computed again
            error = float(self._totals[row] >> shift) * 2.0**-50 * len(self._numbers[row])
            for pattern in np.flatnonzero(np.abs(sums - limit) <= error):
                found[pattern] = abs(self._sum(row, int(pattern))) >= bound
        return found

    def _sum(self, row: int, pattern: int) -> int:
        numbers = self._numbers[row]
        if len(numbers) > EXACT_UP_TO:
            signs = _random_signs(len(numbers))[:, pattern]
            return sum(number if sign > 0 else -number for number, sign in zip(numbers, signs, strict=True))
        return numbers[0] + sum(-number if pattern >> place & 1 else number for place, number in enumerate(numbers[1:]))
