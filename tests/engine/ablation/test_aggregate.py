"""Aggregates of scores over tasks: equal to SciPy, to their definitions, and to rliable with the same resamples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from signalfire.ablation import (
    bootstrap_interval,
    interquartile_mean,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    resamples,
)
from tests.kit import needs

RUNS, TASKS = 10, 3
TAUS = np.linspace(-0.5, 2.0, 11)

Matrix = list[list[float]]


def matrix(seed: int, runs: int = RUNS, tasks: int = TASKS) -> Matrix:
    """Scores with ties, and some below 0 and above 1."""
    generator = random.Random(seed)
    return [[round(generator.gauss(0.6 + task / 5, 0.5), 1) for task in range(tasks)] for _ in range(runs)]


# The definitions, number by number.


def middle_half(scores: Matrix) -> float:
    ordered = sorted(one for run in scores for one in run)
    cut = math.floor(len(ordered) / 4)
    kept = ordered[cut:-cut] if cut else ordered
    return math.fsum(kept) / len(kept)


def shortfall(scores: Matrix) -> float:
    every = [one for run in scores for one in run]
    return 1 - math.fsum(min(one, 1.0) for one in every) / len(every)


def above(scores: Matrix, taus: Any = TAUS) -> list[float]:
    every = [one for run in scores for one in run]
    return [sum(one > tau for one in every) / len(every) for tau in taus]


def better(first: Matrix, second: Matrix) -> float:
    tasks = len(first[0])
    wins = [
        [
            1.0 if one[task] > other[task] else 0.5 if one[task] == other[task] else 0.0
            for one in first
            for other in second
        ]
        for task in range(tasks)
    ]
    return math.fsum(math.fsum(one) / len(one) for one in wins) / tasks


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    rest = place - below
    return ordered[below] if rest == 0 else (1 - rest) * ordered[below] + rest * ordered[below + 1]


def drawn(scores: Matrix, rows: Any) -> Matrix:
    """One resample: in each task by itself, the runs with these indices."""
    return [[scores[rows[run][task]][task] for task in range(len(scores[0]))] for run in range(len(scores))]


@pytest.mark.moderate
@pytest.mark.whole
@pytest.mark.parametrize("seed", range(20))
def test_points_are_those_of_the_definitions_and_of_scipy(seed: int) -> None:
    first, second = matrix(seed), matrix(1000 + seed, runs=7)
    assert float(interquartile_mean(first)) == pytest.approx(middle_half(first), abs=1e-12)
    assert float(interquartile_mean(first)) == pytest.approx(stats.trim_mean(np.ravel(first), 0.25), abs=1e-12)
    assert float(optimality_gap(first)) == pytest.approx(shortfall(first), abs=1e-12)
    assert performance_profile(first, TAUS).tolist() == pytest.approx(above(first), abs=1e-12)
    means = [math.fsum(column) / RUNS for column in zip(*first, strict=True)]
    between = TAUS + 0.013  # no mean is rounded to a threshold
    assert performance_profile(first, between, per_task=True).tolist() == pytest.approx(above([means], between))
    found = float(probability_of_improvement(first, second))
    assert found == pytest.approx(better(first, second), abs=1e-12)
    columns = zip(np.transpose(first), np.transpose(second), strict=True)
    ranked = [stats.mannwhitneyu(one, other).statistic for one, other in columns]
    assert found == pytest.approx(np.mean(ranked) / (RUNS * 7), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_intervals_are_quantiles_over_the_resamples(seed: int) -> None:
    first, second = matrix(seed), matrix(1000 + seed)
    rows, others = (resamples(RUNS, TASKS, repetitions=60, seed=one) for one in (seed, 1000 + seed))
    cases: list[tuple[Callable[..., Any], Callable[..., float]]] = [
        (interquartile_mean, middle_half),
        (optimality_gap, shortfall),
        (lambda scores: performance_profile(scores, TAUS)[..., 4], lambda scores: above(scores)[4]),
    ]
    for statistic, definition in cases:
        values = [definition(drawn(first, one)) for one in rows.tolist()]
        found = bootstrap_interval(statistic, first, indices=rows, level=0.9)
        assert found.tolist() == pytest.approx([quantile(values, 0.05), quantile(values, 0.95)], abs=1e-12)
    pairs = zip(rows.tolist(), others.tolist(), strict=True)
    values = [better(drawn(first, one), drawn(second, other)) for one, other in pairs]
    found = bootstrap_interval(probability_of_improvement, first, second, indices=[rows, others])
    assert found.tolist() == pytest.approx([quantile(values, 0.025), quantile(values, 0.975)], abs=1e-12)


def without_argument(constructor: Callable[..., None]) -> Callable[..., None]:
    """A constructor of arch 8, which calls the generator that rliable passes as ``random_state`` something else."""

    def construct(self: Any, *args: Any, random_state: None = None, **options: Any) -> None:
        constructor(self, *args, **options)

    return construct


@pytest.mark.slow
def test_points_and_intervals_are_those_of_rliable_with_the_same_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("interop", "arch")
    bootstrap = pytest.importorskip("arch.bootstrap")
    library = pytest.importorskip(
        "rliable.library", reason="pip install --no-deps rliable: it asks for an earlier arch"
    )
    metrics = pytest.importorskip("rliable.metrics")
    for one in (bootstrap.IIDBootstrap, bootstrap.IndependentSamplesBootstrap):
        monkeypatch.setattr(one, "__init__", without_argument(one.__init__))

    repetitions = 100
    statistics: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (interquartile_mean, lambda scores: np.array([metrics.aggregate_iqm(scores)])),
        (optimality_gap, lambda scores: np.array([metrics.aggregate_optimality_gap(scores)])),
    ]
    for seed in range(5):
        first, second = np.array(matrix(seed)), np.array(matrix(1000 + seed))
        for ours, theirs in statistics:
            np.random.seed(seed)
            rows = np.stack([np.random.choice(RUNS, (RUNS, TASKS)) for _ in range(repetitions)])
            np.random.seed(seed)  # rliable draws from the global generator
            points, intervals = library.get_interval_estimates({"a": first}, theirs, reps=repetitions)
            assert float(ours(first)) == pytest.approx(float(points["a"][0]), abs=1e-6)
            assert bootstrap_interval(ours, first, indices=rows) == pytest.approx(intervals["a"][:, 0], abs=1e-6)

        np.random.seed(seed)
        shares, bands = library.create_performance_profile({"a": first}, TAUS, reps=repetitions)
        assert performance_profile(first, TAUS) == pytest.approx(shares["a"], abs=1e-6)
        found = bootstrap_interval(lambda scores: performance_profile(scores, TAUS), first, indices=rows)
        assert found == pytest.approx(bands["a"], abs=1e-6)

        np.random.seed(seed)
        both = [[np.random.choice(RUNS, (RUNS, TASKS)) for _ in range(2)] for _ in range(repetitions)]
        np.random.seed(seed)
        points, intervals = library.get_interval_estimates(
            {"a": [first, second]},
            lambda one, other: np.array([metrics.probability_of_improvement(one, other)]),
            reps=repetitions,
        )
        assert float(probability_of_improvement(first, second)) == pytest.approx(float(points["a"][0]), abs=1e-6)
        each = [np.stack([pair[place] for pair in both]) for place in range(2)]
        found = bootstrap_interval(probability_of_improvement, first, second, indices=each)
        assert found == pytest.approx(intervals["a"][:, 0], abs=1e-6)


def test_the_runs_of_each_task_are_drawn_apart_and_the_same_each_time() -> None:
    rows = resamples(5, 3, repetitions=1000)
    assert rows.shape == (1000, 5, 3)
    assert (rows == resamples(5, 3, repetitions=1000)).all()
    assert (rows != resamples(5, 3, repetitions=1000, seed=1)).any()
    assert abs(np.corrcoef(rows[:, 0, 0], rows[:, 0, 1])[0, 1]) < 0.1, "one task says nothing of another"
    assert np.bincount(rows.ravel()).tolist() == pytest.approx([3000] * 5, rel=0.1)


def test_resampling_two_matrices_together_is_not_what_happens_by_default() -> None:
    scores = np.array(matrix(0))
    apart = bootstrap_interval(probability_of_improvement, scores, scores)
    assert apart[0] < 0.45 < 0.55 < apart[1]
    together = bootstrap_interval(probability_of_improvement, scores, scores, indices=resamples(RUNS, TASKS))
    assert together.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.whole
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interquartile_mean([0.1, 0.2]), r"have shape \(2,\); expected \(runs, tasks\)"),
        (lambda: optimality_gap([[0.1, math.nan]]), "some scores are infinite or NaN; give a failed run"),
        (lambda: interquartile_mean(np.zeros((0, 3))), r"have shape \(0, 3\)"),
        (lambda: probability_of_improvement([[0.1]], [[0.1, 0.2]]), "1 and 2 tasks"),
        (lambda: bootstrap_interval(optimality_gap, [[0.1]], level=95), r"level=95\): expected a number between"),
        (lambda: bootstrap_interval(optimality_gap, [[[0.1]]]), "expected one matrix"),
        (
            lambda: bootstrap_interval(optimality_gap, [[0.1], [0.2]], indices=resamples(3, 1)),
            r"for scores of shape \(3, 1\), but the scores have shape \(2, 1\)",
        ),
        (lambda: resamples(0, 2), r"resamples\(runs=0\)"),
    ],
)
def test_what_is_no_matrix_of_scores_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
