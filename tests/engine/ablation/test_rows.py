"""What a report makes of the runs of each variant: pairs within a seed, adjusted tests, and a place for every run."""

from __future__ import annotations

import math
import random

import pytest

from signalfire.ablation.joint import step_down
from signalfire.ablation.report import Report
from signalfire.ablation.results import Result, Variant
from signalfire.ablation.rows import Runs, make_rows
from signalfire.ablation.statistics import compare, exact
from tests.engine.ablation.reports import BASE, BETTER, NOTHING, WORSE, report, results, without


def test_rows_hold_what_was_measured() -> None:
    runs = results("baseline", [0.5, 0.6, 0.7], seconds=2.0, steps=10, memory=100)
    runs += [
        Result("- ema", 0, 0.4, steps=9, seconds=1, memory=50),
        Result("- ema", 2, 0.5, steps=11, seconds=2, memory=70),
    ]
    found = Report(runs, [without("ema"), Variant("baseline")], metric="accuracy", mode="max")
    baseline, ema = found.rows  # the baseline comes first
    assert (baseline.variant.name, baseline.comparison, baseline.adjusted) == ("baseline", None, None)
    assert [baseline.mean, baseline.sd] == pytest.approx([0.6, 0.1])
    assert (baseline.seconds, baseline.steps, baseline.memory) == (2.0, 10, 100)
    assert (ema.finished, ema.planned, ema.missing, dict(ema.failed)) == (2, 3, (1,), {})
    assert (ema.seconds, ema.steps, ema.memory) == (1.5, 10, 70)
    assert ema.differences == pytest.approx({0: -0.1, 2: -0.2})


def test_differences_are_paired_by_seed_and_p_is_adjusted_over_all_variants() -> None:
    found = report({"- ema": WORSE, "- mixup": NOTHING, "- clip": BETTER})
    compared = [compare([exact(one / 100) for one in changes]) for changes in (WORSE, NOTHING, BETTER)]
    assert [row.comparison for row in found.rows[1:]] == compared
    rows = [{seed: exact(one / 100) for seed, one in enumerate(changes)} for changes in (WORSE, NOTHING, BETTER)]
    assert [row.adjusted for row in found.rows[1:]] == step_down(rows)
    assert found.comparisons == 3
    runs = [Result(row.variant.name, seed, value) for row in found.rows for seed, value in row.values.items()]
    random.Random(0).shuffle(runs)
    again = Report(runs, [row.variant for row in found.rows], metric="accuracy", mode="max")
    assert again.rows == found.rows


def test_a_variant_without_any_pair_belongs_to_the_family() -> None:
    found = report({"- ema": WORSE[:6], "- mixup": [None] * 6})
    assert found.comparisons == 2
    assert [row.adjusted for row in found.rows[1:]] == [2 / 64, 2 / 64], (
        "failing whenever the baseline finishes is worse"
    )
    assert [row.verdict for row in found.rows[1:]] == ["worse", "worse"]
    runs = [Result("baseline", seed, value) for seed, value in found.rows[0].values.items()]
    none = Report(runs, [Variant("baseline"), without("ema")], metric="accuracy", mode="max")
    assert (none.rows[1].adjusted, none.rows[1].verdict) == (1.0, "undecided")


def test_seeds_that_were_planned_and_never_run_are_missing() -> None:
    found = report({"- ema": WORSE[:6]}, seeds=range(8))
    assert [(row.finished, row.planned, row.missing) for row in found.rows] == [(6, 8, (6, 7))] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_no_number_is_a_failed_run(value: float) -> None:
    runs = results("baseline", [0.5, 0.6]) + results("- ema", [0.4, value])
    found = Report(runs, [Variant("baseline"), without("ema")], metric="loss", mode="min")
    assert dict(found.rows[1].failed) == {1: f"loss is {value}"}
    assert found.rows[1].mean == 0.4


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("Traceback (most recent call last):\n  File x\nValueError: boom\n", "ValueError: boom"),
        ("Traceback\n  File x\nValueError: boom\nin handler 'ema', epoch 3\n", "ValueError: boom"),
        ("Traceback\n  File x\ntorch.OutOfMemoryError: no\n", "torch.OutOfMemoryError: no"),
        ("Traceback\n  File x\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        ("killed by signal 9", "killed by signal 9"),
        ("", ""),
    ],
)
def test_the_reason_of_a_failure_is_its_error(error: str, reason: str) -> None:
    runs = [Result("baseline", 0, 0.5), Result("- ema", 0, None, error=error)]
    found = Report(runs, [Variant("baseline"), without("ema")], metric="loss", mode="min")
    assert found.rows[1].failed[0] == reason


def test_results_that_belong_nowhere_or_twice_are_refused() -> None:
    runs = results("baseline", [0.5]) + results("- a", [0.4])
    variants = [Variant("baseline"), without("a")]
    with pytest.raises(ValueError, match="variant '- a' and seed 0, but the only variants are"):
        Report(runs, variants[:1], metric="accuracy", mode="max")
    with pytest.raises(ValueError, match="variant '- a' and seed 0, the same as an earlier run"):
        Report([*runs, runs[-1]], variants, metric="accuracy", mode="max")
    with pytest.raises(ValueError, match=r"several variants have the same name: \['- a'\]"):
        Report(runs, [*variants, variants[1]], metric="accuracy", mode="max")


def test_any_variant_may_be_the_baseline_and_the_others_keep_their_order() -> None:
    names = ["a", "b", "c", "d"]
    runs = [Result(name, seed, place / 10 + seed) for place, name in enumerate(names) for seed in (0, 1)]
    rows = make_rows(Runs(runs, [Variant(name) for name in names], "c", (0, 1), "min"), "loss", 0.95)
    assert [row.variant.name for row in rows] == ["c", "a", "b", "d"]
    assert [dict(row.differences) for row in rows] == [{}, {0: -0.2, 1: -0.2}, {0: -0.1, 1: -0.1}, {0: 0.1, 1: 0.1}]


def test_a_variant_of_which_no_run_finished_has_no_numbers() -> None:
    row = report({"- ema": [None] * 3}).rows[1]
    assert all(math.isnan(one) for one in (row.mean, row.sd, row.seconds, row.steps))
    assert (row.memory, row.differences, row.without_pair) == (0, {}, ())
    one = report({"- ema": [-1, None, None]}).rows[1]
    assert one.mean == (BASE[0] - 1) / 100
    assert math.isnan(one.sd)


def test_a_run_that_has_both_a_metric_and_an_error_has_failed() -> None:
    runs = [*results("baseline", [0.5]), Result("- ema", 0, 0.4, error="ValueError: at the very end")]
    row = Report(runs, [Variant("baseline"), without("ema")], metric="loss", mode="min").rows[1]
    assert (row.finished, dict(row.failed)) == (0, {0: "ValueError: at the very end"})
