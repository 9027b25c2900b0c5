"""What a number of seeds finds, against simulations with the test itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from signalfire.ablation import Plan, Variant
from signalfire.ablation.detectability import detectable, power
from signalfire.ablation.statistics import compare, holm
from tests.engine.ablation.test_joint import draws, family, family_error


def by_holm(studies: int, n: int, effects: list[float]) -> float:
    """How often the first of a family is found by Holm's correction of separate tests."""
    generator = np.random.default_rng([studies, n])
    found = 0
    for _ in range(studies):
        rows = family(draws(generator, n, effects, "normal").tolist())
        found += holm([compare(list(row.values())).p for row in rows])[0] <= 0.05
    return found / studies


@pytest.mark.moderate
def test_power_is_that_of_a_simulation() -> None:
    assert power(8, 5, 1.5) == pytest.approx(family_error(400, 8, [1.5, 0, 0, 0, 0])[1], abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "effects"),
    [
        (8, [1.5, 0, 0, 0, 0]),
        (8, [1.5] * 5),
        (6, [2.0]),
        (12, [1.0, 1.0, 0]),
        (15, [0.8, 0, 0, 0, 0]),
    ],
)
def test_power_is_within_a_twentieth_of_a_long_simulation(n: int, effects: list[float]) -> None:
    real = [effect for effect in effects if effect]
    simulated = family_error(2000 if n < 12 else 800, n, effects)[1]
    assert power(n, len(effects), real[0], real=len(real)) == pytest.approx(simulated, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "comparisons"), [(8, 1), (8, 5), (12, 5)])
def test_what_is_found_with_80_percent_is_found_so_often(n: int, comparisons: int) -> None:
    size = detectable(n, comparisons)
    assert family_error(2000 if n < 12 else 800, n, [size] + [0.0] * (comparisons - 1))[1] == pytest.approx(
        0.8, abs=0.05
    )


@pytest.mark.slow
def test_the_step_down_test_finds_more_than_holm() -> None:
    assert power(8, 5, 1.5) >= 0.70
    assert by_holm(2000, 8, [1.5, 0, 0, 0, 0]) < 0.62
    assert power(8, 5, 1.5, real=5) >= 0.85


@pytest.mark.moderate
def test_too_few_seeds_find_nothing() -> None:
    assert power(5, 1, 100.0) == 0.0
    assert detectable(5, 1) == math.inf
    assert power(6, 1, 100.0) == 1.0
    assert detectable(8, 1) < detectable(8, 5) < detectable(7, 5)


def test_what_is_no_power_is_refused() -> None:
    with pytest.raises(ValueError, match=r"power\(comparisons=0, real=1\)"):
        power(8, 0, 1.0)
    with pytest.raises(ValueError, match=r"power\(comparisons=2, real=3\)"):
        power(8, 2, 1.0, real=3)
    with pytest.raises(ValueError, match="pairs=0"):
        power(0, 1, 1.0)
    with pytest.raises(ValueError, match="alpha=5"):
        power(8, 1, 1.0, alpha=5)
    with pytest.raises(ValueError, match="d_z=nan"):
        power(8, 1, math.nan)


@pytest.mark.moderate
def test_a_plan_says_what_its_seeds_can_show() -> None:
    variants = tuple(Variant(name) for name in ("baseline", *"abcde"))
    few, some = Plan(variants, tuple(range(5)), ()), Plan(variants, tuple(range(8)), (), metric="loss", spread=0.1)
    assert few.prospects == (
        "with 5 seeds, no effect can be significant (smallest possible p = 0.062); use 6 or more seeds"
    )
    assert some.prospects.startswith(
        "the smallest possible p with 8 seeds is 0.0078; with 5 comparisons, a difference of 1."
    )
    assert " standard deviations of the paired differences (0.1" in some.prospects
    assert some.prospects.endswith(" in loss) is detected with a probability of 80 %")
    assert some.prospects in " ".join(str(some).split())
    assert max(map(len, str(some).splitlines())) <= 120
    assert some.power(1.5) == power(8, 5, 1.5)
