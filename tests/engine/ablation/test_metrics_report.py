"""Several metrics of the same runs, as one family of tests."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from signalfire.ablation import LeaveOneOut, Pruned, Report, Result, Study, Variant, intervals, step_down
from signalfire.ablation.looks import Looks
from tests.engine.ablation import builds

NAMES = ["baseline", "- ema", "- mixup"]
VARIANTS = [Variant(name) for name in NAMES]
MODES: Any = {"loss": "min", "accuracy": "max", "f1": "max"}


def results(generator: random.Random, *, effect: float = 0.0, seeds: int = 8) -> list[Result]:
    """Runs whose metrics depend on each other; without ema, the loss is greater by this effect."""
    found = []
    for seed in range(seeds):
        common = generator.gauss(0, 1)
        for name in NAMES:
            own = generator.gauss(0, 1)
            loss = common + own + (effect if name == "- ema" else 0)
            accuracy = common - own + generator.gauss(0, 0.5)
            found.append(Result(name, seed, loss, {"loss": loss, "accuracy": accuracy, "f1": accuracy / 2 + 1}))
    return found


def report(found: list[Result], **options: Any) -> Report:
    return Report(found, VARIANTS, metric="loss", mode="min", **options)


def differences(found: list[Result]) -> list[dict[int, Fraction]]:
    values = {(one.variant, one.seed, name): one.metrics[name] for one in found for name in MODES}
    seeds = sorted({one.seed for one in found})
    return [
        {seed: Fraction(values[name, seed, metric]) - Fraction(values["baseline", seed, metric]) for seed in seeds}
        for metric in MODES
        for name in NAMES[1:]
    ]


def test_all_variants_and_metrics_are_one_family() -> None:
    found = results(random.Random(0), effect=3.0)
    several = report(found).metrics(MODES)
    assert [(row.name, row.variant) for row in several.rows] == [
        (metric, name) for metric in MODES for name in NAMES[1:]
    ]
    expected = step_down(differences(found))
    assert [row.adjusted for row in several.rows] == pytest.approx(expected, abs=1e-12)
    assert several.rows[0].conclusion.verdict == "worse"
    low, high = intervals(differences(found))[0]
    assert (several.rows[0].conclusion.low, several.rows[0].conclusion.high) == pytest.approx((low, high))
    assert several.rows[0].adjusted >= (report(found).rows[1].adjusted or 0)
    assert "loss: - ema" in str(several)
    assert "Metrics: loss (smaller is better), accuracy (larger is better), f1 (larger" in str(several)
    assert "of 6 comparisons" in str(several)


def test_without_the_correction_each_metric_is_a_family_of_its_own() -> None:
    found = results(random.Random(1), effect=1.5)
    several = report(found).metrics(MODES, correction="variants")
    for name, mode in MODES.items():
        values = [Result(one.variant, one.seed, one.metrics[name]) for one in found]
        alone = Report(values, VARIANTS, metric=name, mode=mode)
        own = [row for row in several.rows if row.name == name]
        assert [row.adjusted for row in own] == [row.adjusted for row in alone.rows[1:]]
        assert [row.conclusion for row in own] == [row.conclusion for row in alone.rows[1:]]
    assert "2 comparisons for each metric, not across metrics" in " ".join(str(several).split())


def test_what_was_pruned_counts_in_the_family_of_every_metric() -> None:
    found = [one for one in results(random.Random(7), effect=3.0) if one.variant != "- mixup"]
    pruned = Pruned(VARIANTS[2], 1, 2, 2, 2.0, math.nan, 8, 0)
    pruning = report(found, pruned=[pruned])
    alone = pruning.metrics({"loss": "min"})
    assert [row.adjusted for row in alone.rows] == [row.adjusted for row in pruning.rows[1:]]
    assert [row.conclusion for row in alone.rows] == [row.conclusion for row in pruning.rows[1:]]
    several = pruning.metrics(MODES)
    smallest = min(row.row.p or 1.0 for row in several.rows)
    assert min(row.adjusted for row in several.rows) == pytest.approx(min(1.0, 6 * smallest))
    assert "by Holm's procedure for 6 comparisons, with p = 1 for pruned variants" in " ".join(str(several).split())


@pytest.mark.slow
def test_the_correction_keeps_the_error_over_the_metrics() -> None:
    generator = random.Random(2)
    studies, corrected, uncorrected = 60, 0, 0
    for _ in range(studies):
        found = report(results(generator, seeds=7))
        corrected += any(row.adjusted <= 0.05 for row in found.metrics(MODES).rows)
        uncorrected += any(row.adjusted <= 0.05 for row in found.metrics(MODES, correction="variants").rows)
    assert corrected <= studies * 0.05 + 2 * math.sqrt(studies * 0.05 * 0.95)
    assert corrected < uncorrected


def test_failed_runs_count_in_every_metric_and_a_metric_that_one_run_lacks_is_a_failure() -> None:
    found = results(random.Random(3))
    found[1] = Result("- ema", 0, None, {"accuracy": 0.9}, error="ValueError: boom")
    del found[5].metrics["f1"]  # without mixup, seed 1
    several = report(found).metrics(MODES)
    rows = {(row.name, row.variant): row.row for row in several.rows}
    assert list(rows["accuracy", "- ema"].failed) == [0]
    assert list(rows["f1", "- mixup"].failed) == [1]
    assert rows["accuracy", "- mixup"].failures is None
    assert "*: runs failed" in str(several)
    assert [one.value for one in several.reports["accuracy"].results if one.error] == [None]


def test_a_margin_is_that_of_the_metric_of_the_study() -> None:
    several = report(results(random.Random(4)), margin=20.0).metrics(MODES)
    assert {name: one.margin for name, one in several.reports.items()} == {"loss": 20.0, "accuracy": None, "f1": None}
    assert [row.conclusion.verdict for row in several.rows[:2]] == ["equivalent"] * 2
    assert [row.conclusion.verdict for row in several.rows[2:]] == ["undecided"] * 4


def test_its_frame_has_one_row_for_each_comparison() -> None:
    frame = report(results(random.Random(4))).metrics(MODES).frame()
    assert list(frame["metric"]) == ["loss"] * 2 + ["accuracy"] * 2 + ["f1"] * 2
    assert set(frame["verdict"]) <= {"better", "worse", "undecided"}
    assert (np.asarray(frame["p_adjusted"]) >= np.asarray(frame["p"])).all()


def test_what_cannot_be_compared_is_refused() -> None:
    found = report(results(random.Random(5)))
    with pytest.raises(
        KeyError, match="no run has this metric; available metrics: accuracy, f1, loss; did you mean 'accuracy'"
    ):
        found.metrics({"acuracy": "max"})
    with pytest.raises(ValueError, match="correction='holm'"):
        found.metrics(MODES, correction="holm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected at least one metric with its direction"):
        found.metrics({})
    with pytest.raises(ValueError, match="planned looks cover only one metric"):
        report(results(random.Random(6)), looks=Looks([7, 8])).metrics(MODES)


@pytest.mark.moderate
def test_the_metrics_of_a_study_are_in_its_store() -> None:
    def composed(seed: int) -> Any:
        from signalfire.handlers import Average, Metrics

        engine = builds.composed(seed)
        engine.attach(Metrics(loss=Average()))
        return engine, builds.train

    study = Study(composed, metric="val_loss", mode="min", seeds=range(2))
    found = study.run(LeaveOneOut(["ema"]), workers=0).metrics({"val_loss": "min", "loss": "min"})
    assert [row.name for row in found.rows] == ["val_loss", "loss"]
    assert found.reports["val_loss"].rows[0].values == study.report(LeaveOneOut(["ema"])).rows[0].values
    assert found.reports["loss"].rows[0].values != found.reports["val_loss"].rows[0].values
