"""Failed runs count as worse than any finished one, and a handler that prevents failures is never advised against."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import stats

from signalfire.ablation.failures import Failures, failures_of, mcnemar, signed_ranks
from signalfire.ablation.report import Report
from signalfire.ablation.results import Result, Variant
from tests.engine.ablation.reports import report, without
from tests.engine.ablation.test_statistics import by_enumeration

AGAINST = "the setup is better without"


def values(*numbers: float | None) -> dict[int, Fraction | None]:
    return {seed: None if one is None else Fraction(one) for seed, one in enumerate(numbers)}


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (5, 0), (3, 2), (9, 1), (4, 4)])
def test_mcnemar_is_the_binomial_test(first: int, second: int) -> None:
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar(first, second) == pytest.approx(expected, rel=1e-12)


def test_failures_are_counted_in_pairs() -> None:
    variant, baseline = values(1, None, None, 2, None), values(1, 1, None, None, None)
    assert failures_of(variant, baseline) == Failures(1, 1, 2, 1.0)
    assert failures_of(values(1, 2), values(2, 3)) is None
    assert failures_of({0: None}, {1: None}) is None, "no pair"


def test_ranks_are_those_of_wilcoxon_with_failures_beyond_all() -> None:
    variant, baseline = values(5, 1, 4, 2, 9), values(3, 2, 4, 6, 8)
    differences = [2, -1, 0, -4, 1]
    ranks = stats.rankdata(np.abs(differences)) * np.sign(differences)
    assert list(signed_ranks(variant, baseline, "max").values()) == list(ranks)
    failed = signed_ranks(values(None, 1, None, 2, 9), values(3, None, None, 6, 8), "max")
    assert failed == {0: Fraction(-9, 2), 1: Fraction(9, 2), 2: 0, 3: -3, 4: 2}
    assert signed_ranks(values(None, 1), values(3, 2), "min")[0] == 2, "a larger loss"


def test_a_failed_run_is_in_the_test_and_the_means_are_conditional() -> None:
    found = report({"- ema": [None, None, None, None, None, None, 3, 2]})
    row = found.rows[1]
    assert row.failures == Failures(6, 0, 0, 2 / 64)
    assert row.comparison is not None
    assert row.comparison.n == 2
    assert row.p == by_enumeration([Fraction(-11, 2)] * 6 + [Fraction(2), Fraction(1)]) == row.adjusted
    (sentence,) = found.sentences()
    assert (
        "in 6 of 8 pairs, only the run of this variant; in 0, only the run of the baseline; in 0, both runs "
        "(McNemar's exact test: p = 0.031)" in sentence
    )
    assert AGAINST not in sentence


def test_what_fails_more_often_is_not_called_better_even_if_its_other_runs_are() -> None:
    found = report({"- ema": [None, 3, 2, 3, 4, 3, 2, 3]})
    assert found.rows[1].verdict == "undecided"
    (sentence,) = found.sentences()
    assert AGAINST not in sentence
    assert "a variant that fails more often is not recommended" in sentence
    assert "accuracy changed by 2.9 percentage points" in sentence
    assert "7 pairs; conditional on finishing, so this is not an effect of the variant" in sentence
    assert "*" in str(found).splitlines()[3]
    assert "conditional on finishing" in " ".join(str(found).split())


def test_what_prevents_failures_contributes() -> None:
    found = report({"- ema": [None] * 6 + [-1, -2]})
    assert found.rows[1].verdict == "worse"
    assert "accuracy is worse (p = 0.0078, 8 seeds): it contributes." in found.sentences()[0]
    base: list[float | None] = [None] * 6 + [0.92, 0.94]
    other = report({"- ema": [1, 2, 1, 1, 1, 1, 1, 2]}, base=base)
    assert other.rows[1].verdict == "better"
    assert AGAINST in other.sentences()[1]


def test_two_failed_runs_of_a_seed_are_a_tie() -> None:
    base: list[float | None] = [None] * 8
    found = report({"- ema": [None] * 8}, base=base)
    assert (found.rows[1].p, found.rows[1].verdict) == (1.0, "undecided")
    assert found.rows[1].failures == Failures(0, 0, 8, 1.0)


def collapsing(generator: np.random.Generator, seeds: int, gain: float, prevented: float) -> Report:
    """A handler that prevents this share of collapses, and of which the runs that survive without it are better by ``gain``."""
    runs = []
    for seed in range(seeds):
        base = generator.normal()
        runs.append(Result("baseline", seed, base + generator.normal()))
        collapsed = generator.random() < prevented
        value = base + gain + generator.normal()
        runs.append(
            Result("- guard", seed, None if collapsed else value, error="RuntimeError: NaN" if collapsed else None)
        )
    return Report(runs, [Variant("baseline"), without("guard")], metric="score", mode="max")


def advice(studies: int, seeds: int, gain: float) -> dict[str, int]:
    generator = np.random.default_rng([seeds, int(10 * gain)])
    counts = {"failed": 0, "against": 0, "survivors": 0}
    while counts["failed"] < studies:
        found = collapsing(generator, seeds, gain, 0.3)
        if found.rows[1].failed:
            counts["failed"] += 1
            counts["against"] += any(AGAINST in sentence for sentence in found.sentences())
            row: Any = found.rows[1].comparison
            counts["survivors"] += row.p <= 0.05 and row.mean > 0
    return counts


@pytest.mark.moderate
@pytest.mark.parametrize("gain", [1.0, 3.0])
def test_nothing_advises_against_a_handler_that_prevents_collapses(gain: float) -> None:
    counts = advice(30, 12, gain)
    assert counts["against"] == 0
    assert gain < 3 or counts["survivors"] > 20, "the survivors alone would"


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [8, 12, 20])
@pytest.mark.parametrize("gain", [1.0, 2.0, 4.0])
def test_of_200_studies_none_advises_against_a_handler_that_prevents_collapses(seeds: int, gain: float) -> None:
    counts = advice(200, seeds, gain)
    assert counts["against"] == 0
    assert gain < 4 or counts["survivors"] >= 100


@pytest.mark.slow
def test_the_rank_test_keeps_its_level_with_failures() -> None:
    generator = np.random.default_rng(0)
    studies, wrong = 1000, 0
    for _ in range(studies):
        runs = []
        for seed in range(9):
            base = generator.normal()
            for name in ("baseline", "- a"):
                failed = generator.random() < 0.3
                runs.append(
                    Result(name, seed, None if failed else base + generator.normal(), error="E: x" if failed else None)
                )
        row = Report(runs, [Variant("baseline"), without("a")], metric="score", mode="max").rows[1]
        wrong += row.verdict != "undecided"
    assert wrong / studies <= 0.05 + 2 * (0.05 * 0.95 / studies) ** 0.5
