"""The power of a study: which difference a number of seeds finds, by simulation of the step-down test."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .joint import flipped_sums, smallest_p

__all__ = ["detectable", "power"]

_REPETITIONS = 800
_COUNTED_UP_TO = 9  # pairs; above, a power needs no more than so many random patterns
_PATTERNS = 400
_LARGEST = 16.0

Floats = npt.NDArray[np.float64]


def power(pairs: int, comparisons: int, d_z: float, *, real: int = 1, alpha: float = 0.05) -> float:
    """The probability that the step-down test finds a difference, estimated from 800 simulated studies.

    In each study the runs are normal, and the comparisons share a baseline with the same spread as the variants.

    Args:
        pairs: Number of seeds.
        comparisons: Number of comparisons in the family.
        d_z: Size of the real differences, in standard deviations of the paired differences.
        real: Number of comparisons with a real difference; the mean of their probabilities is returned.
        alpha: Significance level for the adjusted p-value.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> power(5, 1, 3.0)  # five pairs cannot reach 0.05
        0.0
        >>> 0.7 < power(8, 5, 1.5) < 0.8
        True
    """
    if comparisons < 1 or not 1 <= real <= comparisons:
        raise ValueError(f"power(comparisons={comparisons!r}, real={real!r}): expected 1 <= real <= comparisons")
    if pairs < 1:
        raise ValueError(f"power(pairs={pairs!r}): expected 1 or more")
    if not 0 < alpha < 1:
        raise ValueError(f"power(alpha={alpha!r}): expected a number between 0 and 1, such as 0.05")
    if not math.isfinite(d_z):
        raise ValueError(f"power(d_z={d_z!r}): expected a finite number")
    if smallest_p(pairs) > alpha:
        return 0.0
    differences = _noise(pairs, comparisons).copy()
    differences[:, :real] += d_z
    parts = np.array_split(differences, _REPETITIONS // 50)
    return float(np.mean([_rejected(part, alpha)[:, :real].mean() for part in parts]))


@lru_cache(maxsize=256)
def detectable(pairs: int, comparisons: int, *, probability: float = 0.8, alpha: float = 0.05) -> float:
    """The difference that is found with this probability where it is the only real one, in standard deviations.

    Args:
        pairs: Number of seeds.
        comparisons: Number of comparisons in the family.
        probability: Probability of finding it.
        alpha: Significance level for the adjusted p-value.

    Returns:
        The smallest such difference, in standard deviations of the paired differences; infinite if there are too few seeds.

    Example:
        >>> detectable(5, 1), 1.0 < detectable(8, 1) < 1.4
        (inf, True)
    """
    low, high = 0.0, _LARGEST
    if power(pairs, comparisons, high, alpha=alpha) < probability:
        return math.inf
    while high - low > 0.02:
        middle = (low + high) / 2
        if power(pairs, comparisons, middle, alpha=alpha) < probability:
            low = middle
        else:
            high = middle
    return high


@lru_cache(maxsize=4)
def _noise(pairs: int, comparisons: int) -> Floats:
    generator = np.random.default_rng([pairs, comparisons])
    runs = generator.normal(size=(_REPETITIONS, comparisons + 1, pairs))
    noise: Floats = (runs[:, 1:] - runs[:, :1]) / math.sqrt(2)
    return noise


def _rejected(studies: Floats, alpha: float) -> npt.NDArray[np.bool_]:
    """Which comparisons of each study the step-down test rejects.

    Args:
        studies: Differences of shape (studies, comparisons, pairs).
        alpha: Significance level.

    Returns:
        Shape (studies, comparisons).
    """
    count, comparisons, pairs = studies.shape
    rows = studies.reshape(-1, pairs)
    flipped = flipped_sums(rows) if pairs <= _COUNTED_UP_TO else rows @ _signs(pairs)
    statistics = np.abs(flipped) / np.sqrt((rows**2).sum(1))[:, None]
    statistics = statistics.reshape(count, comparisons, -1)
    order = np.argsort(-statistics[:, :, 0], axis=1)
    ordered = np.take_along_axis(statistics, order[:, :, None], 1)
    largest = np.maximum.accumulate(ordered[:, ::-1], axis=1)[:, ::-1]  # over the comparisons that remain
    p = (largest >= largest[:, :, :1] * (1 - 1e-12)).mean(2)
    rejected = np.zeros((count, comparisons), dtype=bool)
    np.put_along_axis(rejected, order, np.maximum.accumulate(p, axis=1) <= alpha, 1)
    return rejected


@lru_cache(maxsize=4)
def _signs(pairs: int) -> Floats:
    signs = np.random.default_rng(pairs).integers(0, 2, (pairs, _PATTERNS)).astype(np.float64) * 2 - 1
    signs[:, 0] = 1.0
    return signs
