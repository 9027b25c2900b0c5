"""Scores of several tasks as one number: interquartile mean, optimality gap, performance profile, probability of improvement.

A matrix of scores has shape (runs, tasks): row i is the i-th seed. All functions also take matrices of shape (..., runs, tasks),
as resampling makes them, and then return one number for each.

Intervals are percentiles of a stratified bootstrap: the runs of each task are resampled apart, the tasks stay. They say how the
numbers vary with the seeds, for these tasks. With few runs they are too short: for five runs of one task, 95 % intervals of a
mean cover 77 to 85 %. Whether a variant differs is for the sign-flip test to say (:mod:`signalfire.ablation.joint`).

Source: Agarwal, Schwarzer, Castro, Courville and Bellemare, Deep Reinforcement Learning at the Edge of the Statistical Precipice,
NeurIPS 2021, https://arxiv.org/abs/2108.13264
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from signalfire.authoring.checks import check_int

__all__ = [
    "REPETITIONS",
    "bootstrap_interval",
    "interquartile_mean",
    "optimality_gap",
    "performance_profile",
    "probability_of_improvement",
    "resamples",
]

REPETITIONS = 2000
"""Number of resamples of an interval by default."""

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


def interquartile_mean(scores: npt.ArrayLike) -> Floats:
    """The mean of the middle half of all scores: a quarter of them, rounded down, is dropped at each end.

    Args:
        scores: Shape (..., runs, tasks).

    Example:
        >>> float(interquartile_mean([[0.0, 0.2], [0.4, 9.0]]))
        0.30000000000000004
    """
    matrix = _matrix(scores)
    values = np.sort(matrix.reshape(*matrix.shape[:-2], -1), axis=-1)
    cut = values.shape[-1] // 4
    return np.asarray(values[..., cut : values.shape[-1] - cut].mean(-1))


def optimality_gap(scores: npt.ArrayLike, gamma: float = 1.0) -> Floats:
    """By how much the scores fall short of ``gamma`` on average; scores above it count as ``gamma``. Smaller is better.

    Args:
        scores: Shape (..., runs, tasks).
        gamma: Score beyond which more does not matter.

    Example:
        >>> float(optimality_gap([[0.5, 1.0], [0.75, 3.0]]))
        0.1875
    """
    return np.asarray(gamma - np.minimum(_matrix(scores), gamma).mean((-2, -1)))


def performance_profile(scores: npt.ArrayLike, taus: npt.ArrayLike, *, per_task: bool = False) -> Floats:
    """The share of the scores that are above each threshold.

    Args:
        scores: Shape (..., runs, tasks).
        taus: Thresholds, of shape (thresholds,).
        per_task: Whether to count the mean scores of the tasks instead of the runs.

    Returns:
        Shape (..., thresholds).

    Example:
        >>> performance_profile([[0.2, 0.6], [0.4, 0.8]], [0.0, 0.5, 1.0]).tolist()
        [1.0, 0.5, 0.0]
    """
    matrix = _matrix(scores)
    if per_task:
        matrix = matrix.mean(-2, keepdims=True)
    return np.stack([(matrix > tau).mean((-2, -1)) for tau in np.asarray(taus, dtype=np.float64)], axis=-1)


def probability_of_improvement(first: npt.ArrayLike, second: npt.ArrayLike) -> Floats:
    """How probable it is that a run of the first scores more than a run of the second, in a task chosen at random.

    All pairs of runs of a task count, and ties by half: this is the Mann-Whitney statistic, averaged over the tasks.

    Args:
        first: Scores of shape (..., runs, tasks).
        second: Scores of shape (..., runs, tasks); it may have another number of runs.

    Example:
        >>> float(probability_of_improvement([[0.5], [0.7]], [[0.4], [0.5]]))
        0.875
    """
    one, other = _matrix(first), _matrix(second)
    if one.shape[-1] != other.shape[-1]:
        raise ValueError(
            f"probability_of_improvement(): the two score matrices have {one.shape[-1]} and {other.shape[-1]} tasks; "
            "expected the same tasks in both"
        )
    wins = np.zeros(np.broadcast_shapes(one.shape[:-2], other.shape[:-2]) + one.shape[-1:])
    for run in range(one.shape[-2]):
        own = one[..., run : run + 1, :]
        wins += (own > other).mean(-2) + (own == other).mean(-2) / 2
    return np.asarray((wins / one.shape[-2]).mean(-1))


def resamples(runs: int, tasks: int, *, repetitions: int = REPETITIONS, seed: int = 0) -> Indices:
    """Indices of runs for a stratified bootstrap: the runs of each task are drawn with replacement, apart from other tasks.

    Args:
        runs, tasks: Shape of the scores.
        repetitions: Number of resamples.
        seed: Seed of the generator.

    Returns:
        Shape (repetitions, runs, tasks).
    """
    for name, value in (("runs", runs), ("tasks", tasks), ("repetitions", repetitions)):
        check_int("resamples", name, value)
    return np.random.default_rng(seed).integers(0, runs, (repetitions, runs, tasks))


def bootstrap_interval(
    statistic: Callable[..., Floats],
    *scores: npt.ArrayLike,
    indices: Indices | Sequence[Indices] | None = None,
    level: float = 0.95,
    repetitions: int = REPETITIONS,
) -> Floats:
    """The percentile interval of a statistic by the stratified bootstrap.

    Each matrix is resampled by itself, as if the groups of runs had nothing in common. One array of indices resamples them
    together; `probability_of_improvement` would then be biased, since it compares each run with those of all other seeds.

    Args:
        statistic: Function of as many matrices, such as `interquartile_mean`.
        scores: Matrices of shape (runs, tasks).
        indices: Runs of each resample, of shape (repetitions, runs, tasks), as one array for all matrices, or one for each; by
            default those of `resamples`, with seeds 0, 1, ...
        level: Confidence level.
        repetitions: Number of resamples if no indices are given.

    Returns:
        The lower and the upper ends: shape (2, ...), where the statistic has shape (...).

    Raises:
        ValueError: for scores that are no such matrices, or not finite; and if indices are given for another shape.

    Example:
        >>> low, high = bootstrap_interval(interquartile_mean, [[0.1, 0.5], [0.2, 0.4], [0.3, 0.6]])
        >>> print(f"{low:.3f} to {high:.3f}")
        0.275 to 0.425
    """
    if not 0 < level < 1:
        raise ValueError(f"bootstrap_interval(level={level!r}): expected a number between 0 and 1, such as 0.95")
    matrices = [_matrix(one) for one in scores]
    if any(one.ndim != 2 for one in matrices):
        raise ValueError(
            "bootstrap_interval(scores): expected one matrix of shape (runs, tasks) for each group of runs"
        )
    if indices is None:
        indices = [resamples(*one.shape, repetitions=repetitions, seed=seed) for seed, one in enumerate(matrices)]
    of_each: list[Indices] = [indices] * len(matrices) if isinstance(indices, np.ndarray) else list(indices)
    for one, rows in zip(matrices, of_each, strict=True):
        if rows.shape[1:] != one.shape:
            raise ValueError(
                f"bootstrap_interval(indices=...): the indices are for scores of shape {rows.shape[1:]}, but the "
                f"scores have shape {one.shape}; pass a separate index array for each matrix"
            )
    drawn = [one[rows, np.arange(one.shape[1])] for one, rows in zip(matrices, of_each, strict=True)]
    found: Any = np.percentile(statistic(*drawn), [50 * (1 - level), 50 * (1 + level)], axis=0)
    return np.asarray(found)


def _matrix(scores: npt.ArrayLike) -> Floats:
    matrix = np.asarray(scores, dtype=np.float64)
    if matrix.ndim < 2 or 0 in matrix.shape:
        raise ValueError(f"the scores have shape {matrix.shape}; expected (runs, tasks)")
    if not np.isfinite(matrix).all():
        raise ValueError(
            "some scores are infinite or NaN; give a failed run a finite score, such as the lowest score of its task"
        )
    return matrix
