"""Reports on several tasks: mean scores by seed, aggregates, one family of all tasks, and failed runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from signalfire.ablation import (
    Report,
    Result,
    TasksReport,
    Variant,
    bootstrap_interval,
    interquartile_mean,
    intervals,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    step_down,
)
from tests.engine.ablation.reports import without

ENDS = {"digits": (0.1, 1.0), "wine": (0.4, 0.9), "cancer": (0.5, 1.0)}
VARIANTS = [Variant("baseline"), without("ema"), without("mixup")]
NAMES = [variant.name for variant in VARIANTS]

Values = dict[tuple[str, str], list[float | None]]


def values(seed: int = 0, *, seeds: int = 8, worse: float = 0.05) -> Values:
    """Accuracies by task and variant: without mixup nothing changes, without ema all tasks lose."""
    generator = random.Random(seed)
    found: Values = {}
    for task in ENDS:
        base = [generator.gauss(0.8, 0.02) for _ in range(seeds)]
        for name in NAMES:
            lost = worse if name == "- ema" else 0.0
            found[task, name] = [one - lost + generator.gauss(0, 0.01) for one in base]
    return found


def result(name: str, seed: int, value: float | None) -> Result:
    error = None if value is not None else "Traceback ...\nValueError: boom\n"
    return Result(name, seed, value, steps=10, seconds=0.5, memory=100 + seed, error=error)


def report_of(found: Values, *, missing: Sequence[tuple[str, str, int]] = (), **options: Any) -> TasksReport:
    reports = {}
    for task in ENDS:
        runs = [
            result(name, seed, value)
            for name in NAMES
            for seed, value in enumerate(found[task, name])
            if (task, name, seed) not in missing
        ]
        seeds = range(len(found[task, NAMES[0]]))
        reports[task] = Report(runs, VARIANTS, metric="accuracy", mode="max", seeds=seeds)
    return TasksReport(reports, ENDS, **options)


def scores(found: Values, name: str) -> np.ndarray[Any, Any]:
    columns = [
        [(one - zero) / (full - zero) for one in found[task, name] if one is not None]
        for task, (zero, full) in ENDS.items()
    ]
    return np.array(columns).T


def test_equal_mean_scores_tie_as_fractions_do() -> None:
    generator = random.Random(9)
    sizes, ends = {"small": 30, "large": 45}, {"small": (0.1, 1.0), "large": (1 / 3, 1.0)}
    zeros = {"small": Fraction(1, 10), "large": Fraction(1, 3)}
    right = {
        (task, name, seed): generator.randint(size - 8, size - 3)
        for task, size in sizes.items()
        for name in NAMES[:2]
        for seed in range(7)
    }
    reports = {
        task: Report(
            [Result(name, seed, right[task, name, seed] / size) for name in NAMES[:2] for seed in range(7)],
            VARIANTS[:2],
            metric="accuracy",
            mode="max",
        )
        for task, size in sizes.items()
    }

    def mean(name: str, seed: int) -> Fraction:
        each = [
            (Fraction(right[task, name, seed], size) - zeros[task]) / (1 - zeros[task]) for task, size in sizes.items()
        ]
        return sum(each, Fraction()) / 2

    expected = step_down([{seed: mean("- ema", seed) - mean("baseline", seed) for seed in range(7)}])
    assert [TasksReport(reports, ends).rows[1].adjusted] == expected


def test_the_mean_score_of_a_seed_is_compared_as_any_metric() -> None:
    found = values()
    report = report_of(found)
    means = {name: scores(found, name).mean(1) for name in NAMES}
    plain = Report(
        [Result(name, seed, float(value)) for name in NAMES for seed, value in enumerate(means[name])],
        VARIANTS,
        metric="score",
        mode="max",
    )
    for ours, theirs in zip(report.rows, plain.rows, strict=True):
        assert list(ours.values.values()) == pytest.approx(list(theirs.values.values()), abs=1e-12)
        assert (ours.p, ours.verdict) == (theirs.p, theirs.verdict)
        assert ours.adjusted == theirs.adjusted
    assert [row.verdict for row in report.rows] == [None, "worse", "undecided"]
    assert report.rows[0].steps == 30
    assert report.rows[0].seconds == pytest.approx(1.5)
    assert report.rows[0].memory == 107


@pytest.mark.moderate
def test_aggregates_are_those_of_the_matrices_of_all_runs() -> None:
    found = values(1)
    report = report_of(found)
    baseline = scores(found, "baseline")
    for one in report.aggregates:
        own = scores(found, one.variant)
        assert report.matrix(one.variant) == pytest.approx(own, abs=1e-12)
        assert one.interquartile_mean.value == pytest.approx(float(interquartile_mean(own)))
        assert one.optimality_gap.value == pytest.approx(float(optimality_gap(own)))
        low, high = bootstrap_interval(interquartile_mean, own)
        assert (one.interquartile_mean.low, one.interquartile_mean.high) == pytest.approx((float(low), float(high)))
        if one.variant == "baseline":
            assert one.improvement is None
        else:
            assert one.improvement is not None
            assert one.improvement.value == pytest.approx(float(probability_of_improvement(own, baseline)))
            assert one.improvement.low <= one.improvement.value <= one.improvement.high
    profile = report.profiles([0.5, 0.8])["- ema"]
    assert profile.shares.tolist() == performance_profile(scores(found, "- ema"), [0.5, 0.8]).tolist()
    text = str(report)
    assert "interquartile mean" in text
    assert f"{report.aggregates[1].interquartile_mean.value:.3f} [" in text


def test_the_comparisons_of_all_tasks_are_one_family() -> None:
    found = values(2, worse=0.02)
    report = report_of(found)
    differences = []
    for task in ENDS:
        for name in NAMES[1:]:
            pairs = zip(found[task, name], found[task, "baseline"], strict=True)
            differences.append(
                {
                    seed: Fraction(a) - Fraction(b)
                    for seed, (a, b) in enumerate(pairs)
                    if a is not None and b is not None
                }
            )
    assert [(one.name, one.variant) for one in report.by_task] == [(task, name) for task in ENDS for name in NAMES[1:]]
    assert [one.adjusted for one in report.by_task] == pytest.approx(step_down(differences), abs=1e-12)
    ends = [end for interval in intervals(differences) for end in interval]
    assert len({one.adjusted for one in report.by_task}) > 1
    for one, low, high in zip(report.by_task, ends[::2], ends[1::2], strict=True):
        if low > 0 or high < 0:
            assert (one.conclusion.low, one.conclusion.high) == pytest.approx((low, high))
        # Over one task alone, the family is smaller.
        assert one.row.adjusted is not None
        assert one.adjusted >= one.row.adjusted - 1e-12


@pytest.mark.slow
def test_no_family_of_tasks_errs_more_often_than_it_may() -> None:
    generator = random.Random(0)
    wrong = 0
    for _ in range(60):
        found = values(generator.randrange(10**9), seeds=6, worse=0.0)
        report = report_of(found)
        wrong += any(one.conclusion.verdict != "undecided" for one in report.by_task)
    assert wrong <= 60 * 0.05 + 2 * math.sqrt(60 * 0.05 * 0.95)


def test_a_failed_run_counts_as_worst_and_is_named() -> None:
    found = values(3, worse=0.0)
    found["wine", "- ema"][2] = None
    report = report_of(found)
    own = report.matrix("- ema")
    assert own.shape == (8, 3)
    assert own[2, 1] == 0.0, "the lowest of the task is above 0"
    assert list(report.rows[1].failed) == [2]
    assert report.rows[1].verdict != "better"
    assert report.floored == 1
    assert [(one.variant, one.seed, one.value) for one in report.results if one.error] == [("- ema", 2, None)]
    assert (
        "1 failed run counts in aggregates and profiles as the lowest score of the task, but never as more than 0."
        in report.warnings()
    )
    assert 'wine: ValueError: boom' in report.warnings()[0]  # fmt: skip
    found["wine", "baseline"][5] = 0.2  # a score of -0.4
    assert report_of(found).matrix("- ema")[2, 1] == pytest.approx(-0.4)


def test_variants_of_which_runs_fail_are_never_called_better() -> None:
    found = values(4, worse=-0.1)  # without ema all is better
    assert report_of(found).rows[1].verdict == "better"
    for seed in range(3):
        found["digits", "- ema"][seed] = None
    report = report_of(found)
    assert report.rows[1].verdict == "undecided"
    (digits, *_) = report.by_task
    assert (digits.name, digits.conclusion.verdict) == ("digits", "undecided")


def test_failed_runs_of_a_task_rank_below_all_finished_ones() -> None:
    found = values(7)
    for seed in range(3):
        found["digits", "- ema"][seed] = None
    report = report_of(found)
    (digits, *_) = report.by_task
    # All 8 pairs are worse; the 5 that finished could not show it.
    assert (digits.name, digits.conclusion.verdict) == ("digits", "worse")
    assert digits.adjusted == 2 / 2**8
    line = next(line for line in str(report).splitlines() if line.startswith("digits: - ema"))
    assert line.split()[3] == "5/8"
    assert line.split()[4].endswith("*")


def test_seeds_that_have_not_run_everywhere_are_left_out_and_named() -> None:
    report = report_of(values(5), missing=[("digits", "- mixup", 7), ("wine", "baseline", 0)])
    assert report.complete == (1, 2, 3, 4, 5, 6)
    assert report.matrix("- ema").shape == (6, 3)
    assert (
        "Aggregates and profiles omit these seeds, because not all variants and tasks ran with them: 0 and 7."
        in report.warnings()
    )
    assert report.rows[0].missing == (0,)
    nothing = report_of(values(5, seeds=2), missing=[("digits", "baseline", 0), ("digits", "- ema", 1)])
    assert nothing.aggregates == ()
    assert nothing.profiles() == {}
    assert "interquartile" not in str(nothing)


@pytest.mark.moderate
def test_a_single_seed_has_no_interval_that_would_claim_certainty(tmp_path: Path) -> None:
    report = report_of(values(8, seeds=1))
    (baseline, *_) = report.aggregates
    assert math.isnan(baseline.interquartile_mean.low)
    assert baseline.interquartile_mean.value == pytest.approx(
        float(interquartile_mean(scores(values(8, seeds=1), "baseline")))
    )
    shown = [line.split() for line in str(report).splitlines() if line.startswith("baseline")][1]
    assert shown == [
        "baseline",
        f"{baseline.interquartile_mean.value:.3f}",
        f"{baseline.optimality_gap.value:.3f}",
        "-",
    ]
    assert report.to_dict()["aggregates"][0]["interquartile_mean"]["low"] is None
    assert np.isnan(report.profiles()["- ema"].low).all()
    report.html(tmp_path / "report.html")


def test_smaller_values_may_be_better() -> None:
    def report(shift: float) -> Report:
        runs = [Result("baseline", seed, 1.0 + shift + seed / 10) for seed in range(6)]
        runs += [Result("- ema", seed, 1.3 + shift + seed / 9) for seed in range(6)]
        return Report(runs, VARIANTS[:2], metric="loss", mode="min")

    found = TasksReport({"one": report(0), "two": report(1)}, (4.0, 0.0))
    assert found.matrix("baseline")[0].tolist() == pytest.approx([0.75, 0.5])
    assert [row.verdict for row in found.rows] == [None, "worse"]
    assert found.sentences()[0].startswith("Without ema, score fell by 0.08")
    assert found.sentences()[1].startswith('In one, "- ema" is worse: loss changes by 0.328 (p = 0.031 adjusted for 2')


@pytest.mark.moderate
def test_every_form_of_the_report_has_the_tasks(tmp_path: Path) -> None:
    report = report_of(values(6), margin=0.2)
    assert report.rows[1].verdict == "equivalent"
    for text in (str(report), report.markdown()):
        assert "digits: " in text
        assert "interquartile mean" in text
        assert "digits 0.1 and 1, wine 0.4 and 0.9, cancer 0.5 and 1" in " ".join(text.split())
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["scores"]["wine"] == [0.4, 0.9]
    assert set(content["tasks"]) == set(ENDS)
    assert len(content["by_task"]) == 6
    assert content["aggregates"][0]["improvement"] is None
    assert "on each of 3 tasks (digits, wine, cancer), and its score is the mean of" in report.methods()
    assert "digits: 0.1 and 1; wine: 0.4 and 0.9" in report.methods()
    report.html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "digits: - ema" in page
    assert page.count("<svg") == 3
    assert all(f"<h2>{title}</h2>" in page for title in ("Aggregates", "Performance profiles"))
    assert report.csv().count("\n") == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "loss"}, "'digits' and 'wine' have different metrics: accuracy and loss"),
        ({"mode": "min"}, "different directions"),
        ({"seeds": range(9)}, "different seeds"),
        ({"level": 0.9}, "different levels"),
    ],
)
def test_reports_on_other_runs_are_no_tasks_of_one_study(change: dict[str, Any], message: str) -> None:
    runs = [Result(name, seed, 0.5) for name in NAMES for seed in range(2)]
    options: dict[str, Any] = {"metric": "accuracy", "mode": "max"}
    one, other = Report(runs, VARIANTS, **options), Report(runs, VARIANTS, **options | change)
    with pytest.raises(ValueError, match=message):
        TasksReport({"digits": one, "wine": other}, (0.0, 1.0))
    with pytest.raises(ValueError, match="1 tasks; expected two or more"):
        TasksReport({"digits": one}, (0.0, 1.0))
    with pytest.raises(KeyError, match="no variant has this name; the variants are baseline, - ema"):
        TasksReport({"digits": one, "wine": one}, (0.0, 1.0)).matrix("ema")
