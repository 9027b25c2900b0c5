"""Planned looks: studies that stop early, with the error of one look.

Looking after some seeds, and adding more if nothing was found, finds differences that do not exist in more than 5 % of studies. A
plan of looks spends the error: by a look at n of N seeds, at most alpha * n / N of all sign patterns have crossed a boundary. The
boundary of each look is exact, as it comes from the joint sign flips of the seeds seen so far, which determine all earlier looks
too. Each intersection of hypotheses has boundaries of its own, and a difference is found when all intersections that hold it have
crossed theirs (a closed test), so that the probability of any false finding is at most alpha, for any number of real effects.
Above 6 comparisons there would be too many intersections: each look then makes a step-down test at the level that it adds.

Variants that are decided need no further runs. Nothing stops for futility.

Source: Lan and DeMets, Discrete Sequential Boundaries for Clinical Trials, Biometrika 70, 1983, doi:10.1093/biomet/70.3.659
(spending); Marcus, Peritz and Gabriel, On Closed Testing Procedures, Biometrika 63, 1976; Mathieu et al., AdaStop, 2023,
https://arxiv.org/abs/2306.10882 (permutation boundaries for unpaired agents).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np
import numpy.typing as npt

from signalfire.authoring.checks import check_int

from .joint import EXACT_UP_TO, Differences, flipped_sums, step_down

__all__ = ["Looks", "Sequential"]

CLOSED_UP_TO = 6
"""Maximum number of comparisons for which all intersections are tested."""

_TIE = 1 + 1e-9

Crossed = npt.NDArray[np.bool_]


class Looks:
    """A plan of looks at a study.

    Args:
        sizes: Number of seeds at each look, increasing; at most 20.
        alpha: Probability of any false finding over all looks.

    Raises:
        TypeError, ValueError: for sizes that are not increasing, or a look at which no result could reach the boundary.

    Example:
        >>> Looks([7, 10, 14, 20]).spent(7)
        0.0175
        >>> Looks([5, 10])
        Traceback (most recent call last):
            ...
        ValueError: Study(looks=[5, 10]): with 5 seeds, no result can be significant at this look; use at least 7 seeds
    """

    def __init__(self, sizes: Sequence[int], alpha: float = 0.05) -> None:
        if isinstance(sizes, str) or not isinstance(sizes, Sequence):
            raise TypeError(f"Study(looks={sizes!r}): expected numbers of seeds, such as [7, 10, 14, 20]")
        self.sizes = tuple(check_int("Study", "looks", size, least=2) for size in sizes)
        self.alpha = alpha
        if len(self.sizes) < 2 or any(one >= other for one, other in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(
                f"Study(looks={list(sizes)}): expected two or more increasing numbers of seeds, such as [7, 10, 14, 20]"
            )
        if self.sizes[-1] > EXACT_UP_TO:
            raise ValueError(
                f"Study(looks={list(sizes)}): the boundaries are exact only up to {EXACT_UP_TO} seeds; "
                f"plan the last look at {EXACT_UP_TO} seeds or fewer"
            )
        for place, size in enumerate(self.sizes):
            if not self._reachable(place, size):
                raise ValueError(
                    f"Study(looks={list(sizes)}): with {size} seeds, no result can be significant at this look; "
                    f"{self._smallest(place)}"
                )

    def check(self, seeds: Sequence[int]) -> None:
        """Raise a ValueError if there are more or fewer seeds than the last look takes."""
        if len(seeds) != self.sizes[-1]:
            raise ValueError(
                f"Study(looks={list(self.sizes)}): the last look uses {self.sizes[-1]} seeds, but seeds= has "
                f"{len(seeds)}; these numbers must match"
            )

    def spent(self, size: int) -> float:
        """The part of alpha that is spent up to a look at ``size`` seeds."""
        return self.alpha * size / self.sizes[-1]

    def added(self, size: int) -> float:
        """The part of alpha that a look adds to that of the one before: the level of its intervals is 1 - this."""
        place = self.sizes.index(size)
        return self.spent(size) - (self.spent(self.sizes[place - 1]) if place else 0.0)

    def __repr__(self) -> str:
        return f"Looks({list(self.sizes)}, alpha={self.alpha})"

    def _reachable(self, place: int, size: int) -> bool:
        """Whether look ``place``, at ``size`` seeds, may add a pattern to those of the look before it."""
        last = max(size, self.sizes[-1]) if place < len(self.sizes) - 1 else size
        patterns = 2 ** (size - 1)
        before = 0
        if place:
            earlier = self.sizes[place - 1]
            before = _allowed(self.alpha * earlier / last, 2 ** (earlier - 1)) * 2 ** (size - earlier)
        return _allowed(self.alpha * size / last, patterns) > before

    def _smallest(self, place: int) -> str:
        least = self.sizes[place - 1] + 1 if place else 2
        most = self.sizes[place + 1] if place + 1 < len(self.sizes) else EXACT_UP_TO + 1
        for size in range(least, most):
            if self._reachable(place, size):
                return f"use at least {size} seeds"
        return f"omit the look at {self.sizes[place]} seeds"


class Sequential:
    """The results of the looks made so far.

    Args:
        looks: The plan.
        names: Names of the comparisons.

    Attributes:
        decided: Number of seeds at the look at which each comparison was found to differ, by name.
        undecided: Names of the comparisons that no look has found to differ yet.
        made: Number of seeds at each look made so far.
    """

    def __init__(self, looks: Looks, names: Sequence[str]) -> None:
        self.looks = looks
        self.names = tuple(names)
        self.decided: dict[str, int] = {}
        self.made: list[int] = []
        self._crossed: dict[tuple[str, ...], Crossed] = {}  # by each intersection that has not crossed: its patterns
        if len(names) <= CLOSED_UP_TO:
            subsets = (those for size in range(1, len(names) + 1) for those in combinations(self.names, size))
            self._crossed = {those: np.zeros(1, dtype=bool) for those in subsets}

    @property
    def undecided(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.decided)

    @property
    def next(self) -> int | None:
        """Number of seeds at the next look; None if there is none, or nothing is left to decide."""
        sizes = self.looks.sizes
        return sizes[len(self.made)] if len(self.made) < len(sizes) and self.undecided else None

    def look(self, scores: Mapping[str, Differences], seeds: Sequence[int]) -> tuple[str, ...]:
        """Make the next look; returns the names of the comparisons that it finds to differ.

        Args:
            scores: The differences, or signed ranks, of each undecided comparison, by seed.
            seeds: The seeds of this look in the order of the plan: those of the earlier looks come first.
        """
        size = self.next
        if size is None or len(seeds) != size:
            raise ValueError(f"look(seeds=...): got {len(seeds)} seeds, but the next look is at {size} seeds")
        found = self._closed(scores, seeds, size) if self._crossed else self._by_steps(scores, size)
        self.made.append(size)
        self.decided |= dict.fromkeys(found, size)
        return found

    def _by_steps(self, scores: Mapping[str, Differences], size: int) -> tuple[str, ...]:
        names = self.undecided
        adjusted = step_down([scores[name] for name in names])
        return tuple(name for name, p in zip(names, adjusted, strict=True) if p <= self.looks.added(size))

    def _closed(self, scores: Mapping[str, Differences], seeds: Sequence[int], size: int) -> tuple[str, ...]:
        statistics = {name: _statistics(scores[name], seeds) for name in self.undecided}
        allowed = _allowed(self.looks.spent(size), 2 ** (size - 1))
        for those, before in list(self._crossed.items()):
            largest = statistics[those[0]]
            for name in those[1:]:
                largest = np.maximum(largest, statistics[name])
            # The low bits of a pattern are the signs of the seeds of the look before.
            crossed = np.tile(before, len(largest) // len(before))
            left = allowed - int(np.count_nonzero(crossed))
            remaining = np.where(crossed, -1.0, largest)
            boundary = -np.partition(-remaining, left)[left] if left > 0 else math.inf
            crossed |= remaining > boundary * _TIE  # patterns that tie with the boundary stay below it
            if crossed[0]:  # the first pattern is the observed one
                del self._crossed[those]
            else:
                self._crossed[those] = crossed
        return tuple(name for name in self.undecided if not any(name in those for those in self._crossed))


def _allowed(alpha: float, patterns: int) -> int:
    return math.floor(alpha * patterns * (1 + 1e-9))


def _statistics(scores: Differences, seeds: Sequence[int]) -> npt.NDArray[np.float64]:
    values = np.array([[float(scores.get(seed, Fraction(0))) for seed in seeds]])
    largest = float(np.abs(values).max())
    if largest == 0:
        return np.zeros(2 ** (len(seeds) - 1))
    values /= largest
    found: npt.NDArray[np.float64] = np.abs(flipped_sums(values))[0] / math.sqrt(float((values**2).sum()))
    return found
