"""The joint sign-flip test and its intervals against brute force, and simulations whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from scipy import stats

from signalfire.ablation.joint import Differences, intervals, smallest_p, step_down
from signalfire.ablation.statistics import compare, exact, holm


def family(rows: Sequence[Sequence[float | None]]) -> list[Differences]:
    return [{seed: exact(one) for seed, one in enumerate(row) if one is not None} for row in rows]


def by_enumeration(rows: Sequence[Differences], seeds: int) -> list[float]:
    """The definition of the step-down test, pattern by pattern, in fractions."""

    def statistic(row: Differences, signs: Sequence[int]) -> Fraction:
        total = sum((signs[seed] * one for seed, one in row.items()), Fraction())
        squares = sum((one * one for one in row.values()), Fraction())
        return total**2 / squares if squares else Fraction(0)

    patterns = list(product((1, -1), repeat=seeds))
    observed = [statistic(row, patterns[0]) for row in rows]
    order = sorted(range(len(rows)), key=lambda place: observed[place], reverse=True)
    adjusted, largest = [1.0] * len(rows), 0.0
    for rank, place in enumerate(order):
        reached = sum(
            max(statistic(rows[other], signs) for other in order[rank:]) >= observed[place] for signs in patterns
        )
        largest = max(largest, reached / len(patterns))
        adjusted[place] = largest
    return adjusted


@pytest.mark.moderate
@pytest.mark.whole
@pytest.mark.parametrize("seeds", range(2, 8))
def test_step_down_is_its_definition_with_ties_and_missing_seeds(seeds: int) -> None:
    generator = random.Random(seeds)
    for _ in range(4):
        few = family([[generator.randint(-4, 6) / 360 for _ in range(seeds)] for _ in range(3)])
        assert step_down(few) == by_enumeration(few, seeds)
        long = family([[generator.gauss(0.5, 1) for _ in range(seeds)] for _ in range(3)])
        long[1] = {seed: one for seed, one in long[1].items() if seed != 1}
        assert step_down(long) == by_enumeration(long, seeds)


def test_floats_that_no_double_holds_exactly_still_tie() -> None:
    # As integers of one scale these have 70 bits. The second comparison is the first with two seeds exchanged.
    numbers = [Fraction(10**20 + place, 3**40) for place in (1, 2, 4, 8, 16, 32, 64)]
    swapped = [numbers[1], numbers[0], *numbers[2:]]
    rows = [dict(enumerate(numbers)), dict(enumerate(swapped))]
    assert step_down(rows) == by_enumeration(rows, 7) == [2 / 128] * 2


def test_one_comparison_is_the_sign_flip_test() -> None:
    generator = random.Random(0)
    for n in (2, 6, 11):
        row = [generator.gauss(0.4, 1) for _ in range(n)]
        assert step_down(family([row])) == [compare(row).p]


@pytest.mark.moderate
def test_it_is_never_larger_than_holm_by_more_than_ties_and_often_smaller() -> None:
    generator = np.random.default_rng(0)
    smaller = 0
    for _ in range(30):
        baseline = generator.normal(size=8)
        rows = (generator.normal(size=(4, 8)) - baseline + [[1.0]] * 4).tolist()
        joint, bound = step_down(family(rows)), holm([compare(row).p for row in rows])
        smaller += sum(one < other for one, other in zip(joint, bound, strict=True))
    assert smaller > 60


@pytest.mark.moderate
def test_more_than_twenty_seeds_draw_signs_the_same_each_time() -> None:
    rows = family(np.random.default_rng(0).normal(0.2, 1, (2, 25)).tolist())
    drawn = step_down(rows)
    assert drawn == step_down(rows)
    alone = stats.ttest_1samp([float(one) for one in rows[0].values()], 0).pvalue
    assert drawn[0] >= alone * 0.9
    assert step_down(family([[1.0] * 30])) == [1 / (2**16 + 1)] == [smallest_p(30)]


def test_comparisons_without_a_difference_are_not_rejected() -> None:
    assert step_down([]) == []
    assert step_down(family([[0, 0, 0], [1, 2, 1]]))[0] == 1.0
    assert step_down([{}, dict(enumerate([Fraction(1)] * 6))]) == [1.0, 2 / 64]


def test_the_interval_of_one_comparison_is_what_the_test_does_not_reject() -> None:
    generator = random.Random(1)
    for n in (6, 7, 9):
        row = [generator.gauss(0.3, 1) for _ in range(n)]
        ((low, high),) = intervals(family([row]))
        for inside in (low + 1e-9, high - 1e-9, (low + high) / 2):
            assert compare([one - inside for one in row]).p > 0.05
        for outside in (low - 1e-9, high + 1e-9, low - 10, high + 10):
            assert compare([one - outside for one in row]).p <= 0.05


def test_intervals_of_a_family_are_what_the_single_step_test_does_not_reject() -> None:
    rows = np.random.default_rng(3).normal(0.2, 1, (3, 7))
    patterns = np.array(list(product((1, -1), repeat=7)))
    for place, (low, high) in enumerate(intervals(family(rows.tolist()))):
        for shift, rejected in ((low - 1e-9, True), (low + 1e-9, False), (high - 1e-9, False), (high + 1e-9, True)):
            shifted = rows - rows.mean(1, keepdims=True)
            shifted[place] = rows[place] - shift
            flipped = np.abs(patterns @ shifted.T) / np.sqrt((shifted**2).sum(1))
            observed = abs(shifted[place].sum()) / math.sqrt((shifted[place] ** 2).sum())
            assert ((flipped.max(1) >= observed * (1 - 1e-12)).mean() <= 0.05) == rejected


def test_too_few_seeds_have_no_interval_and_equal_differences_one_of_no_width() -> None:
    assert intervals(family([[1, 2, 3, 4, 5]])) == [(-math.inf, math.inf)]
    assert intervals(family([[0.5] * 6])) == [(0.5, 0.5)]
    assert all(math.isnan(one) for one in intervals([{}, *family([[1.0] * 6])])[0])
    assert intervals([]) == []


def draws(generator: np.random.Generator, n: int, effects: Sequence[float], distribution: str) -> np.ndarray:
    """Differences of variants that share a baseline, with a standard deviation of 1 and these means."""
    shape = (len(effects) + 1, n)
    runs = generator.normal(size=shape) if distribution == "normal" else generator.standard_t(3, shape) / math.sqrt(3)
    differences: np.ndarray = (runs[1:] - runs[:1]) / math.sqrt(2) + np.array(effects)[:, None]
    return differences


def coverage(studies: int, n: int, effects: Sequence[float], distribution: str = "normal") -> float:
    """How often all intervals of a family hold their means."""
    generator = np.random.default_rng([studies, n])
    covered = 0
    for _ in range(studies):
        found = intervals(family(draws(generator, n, effects, distribution).tolist()))
        covered += all(low <= effect <= high for (low, high), effect in zip(found, effects, strict=True))
    return covered / studies


def family_error(studies: int, n: int, effects: Sequence[float]) -> tuple[float, float]:
    """How often any null is rejected, and the mean share of real differences that are found."""
    generator = np.random.default_rng([studies, n, len(effects)])
    wrong, right = 0, 0.0
    real = [place for place, effect in enumerate(effects) if effect]
    for _ in range(studies):
        adjusted = step_down(family(draws(generator, n, effects, "normal").tolist()))
        wrong += any(adjusted[place] <= 0.05 for place, effect in enumerate(effects) if not effect)
        right += sum(adjusted[place] <= 0.05 for place in real) / max(1, len(real))
    return wrong / studies, right / studies


def two_errors(studies: int, rate: float) -> float:
    return 2 * math.sqrt(rate * (1 - rate) / studies)


@pytest.mark.moderate
def test_intervals_hold_together_and_a_family_errs_seldom() -> None:
    assert coverage(200, 8, [0.0, 0.5, 2.0, 5.0, 0.0]) >= 0.95 - two_errors(200, 0.95)
    wrong, right = family_error(200, 8, [1.5, 0, 0, 0, 0])
    assert wrong <= 0.05 + two_errors(200, 0.05)
    assert right >= 0.70 - two_errors(200, 0.70)


@pytest.mark.slow
@pytest.mark.parametrize("effects", [[0.0] * 5, [0.0, 0.5, 2.0, 5.0, -50.0]])
@pytest.mark.parametrize("n", [6, 8, 12])
def test_intervals_hold_together_whatever_the_effects_are(n: int, effects: list[float]) -> None:
    studies = 1000 if n < 12 else 500
    for distribution in ("normal", "t3"):
        assert coverage(studies, n, effects, distribution) >= 0.95 - two_errors(studies, 0.95)


@pytest.mark.slow
def test_step_down_finds_what_holm_misses_and_keeps_its_level() -> None:
    studies = 1500
    limit = 0.05 + two_errors(studies, 0.05)
    wrong, one = family_error(studies, 8, [1.5, 0, 0, 0, 0])
    assert wrong <= limit
    assert one >= 0.70
    _, five = family_error(studies, 8, [1.5] * 5)
    assert five >= 0.85
    for effects in ([0.0] * 5, [1.5, 1.5, 1.5, 0, 0], [30.0, 0, 0]):
        assert family_error(studies, 8, effects)[0] <= limit
