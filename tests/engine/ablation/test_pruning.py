"""Successive halving: which variants are pruned, that nothing else changes, and that the tests account for the choice."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import mse_loss

from signalfire import Engine, Events, Update, seed_everything
from signalfire.ablation import (
    Cumulative,
    Factorial,
    FractionalFactorial,
    Halving,
    LeaveOneOut,
    Pruned,
    Report,
    Variant,
    Variants,
    read_reports,
    step_down,
)
from signalfire.ablation.pruning import Pruning, adjusted_with_pruned
from signalfire.handlers import Average, Metrics, Validation
from tests.engine.ablation import builds
from tests.engine.ablation.builds import make_study
from tests.engine.ablation.reports import BASE, BETTER, NOTHING, WORSE, report, results, without
from tests.engine.ablation.test_study import apart_from_timings
from tests.kit import quick

DESIGN = LeaveOneOut(["ema", "gradient_clipping", "gradient_noise"])
PLAN = Halving([1], keep=0.5)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a study of six seeds that prunes one of three variants after the first of two epochs."""
    path = tmp_path_factory.mktemp("pruned") / "store.jsonl"
    make_study(store=path, seeds=range(6), prune=PLAN).run(DESIGN, workers=0)
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def after_one_epoch(seed: int, without: Sequence[str]) -> float:
    """The metric of a run that is given one epoch."""
    seed_everything(seed)
    engine = builds.composed(seed)
    engine.streams = "separate"
    with engine.without(*without):
        engine.run(builds.data(0), max_epochs=1)
    return float(engine.state.metrics["val_loss"])


@pytest.mark.moderate
def test_the_worst_mean_rank_is_pruned_and_the_evidence_is_stored(stored: Path) -> None:
    names = ["ema", "gradient_clipping", "gradient_noise"]
    values = np.array([[after_one_epoch(seed, [name]) for name in names] for seed in range(6)])
    baseline = np.array([after_one_epoch(seed, []) for seed in range(6)])
    ranks = np.array([stats.rankdata(row) for row in values]).mean(axis=0)  # smaller is better
    worst = int(ranks.argmax())
    marks = [line for line in lines_of(stored) if "pruned" in line]
    assert {line["variant"] for line in marks} == {f"- {names[worst]}"}
    assert [line["seed"] for line in marks] == list(range(6))
    for line in marks:
        mark = line["pruned"]
        assert line["until"] == mark["epoch"] == 1
        assert (mark["place"], mark["of"], mark["seeds"], mark["failed"]) == (3, 3, 6, 0)
        assert mark["rank"] == pytest.approx(ranks[worst], rel=1e-12)
        assert mark["difference"] == pytest.approx((values[:, worst] - baseline).mean(), rel=1e-6)
    early = {(line["variant"], line["seed"]): line for line in lines_of(stored) if "until" in line}
    assert all(early["baseline", seed]["metrics"]["val_loss"] == baseline[seed] for seed in range(6))
    assert all(line["steps"] == 3 for line in early.values())


@pytest.mark.moderate
def test_the_runs_that_go_on_are_those_of_a_study_that_prunes_nothing(stored: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    make_study(store=whole, seeds=range(6)).run(DESIGN, workers=0)
    plain = {line["key"]: line for line in lines_of(whole)}
    kept = [line for line in lines_of(stored) if "until" not in line]
    assert len(kept) == 18
    for line in kept:
        assert {**line, "timing": 0, "sum": 0} == {**plain[line["key"]], "timing": 0, "sum": 0}


@pytest.mark.moderate
@pytest.mark.parametrize("count", quick([0, 7, 24, 30, 41], 30))
def test_a_study_that_was_killed_comes_to_the_same_store(count: int, stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    lines = sorted(stored.read_bytes().splitlines(keepends=True), key=lambda line: b'"until"' not in line)
    marked = [line for line in lines if b'"pruned"' in line]
    # Killed after so many runs, and, of those that end early, before the last marks were written.
    there = [line for line in lines[:count] if line not in marked[3:]]
    path.write_bytes(b"".join(there))
    make_study(store=path, seeds=range(6), prune=PLAN).run(DESIGN, workers=0)
    assert apart_from_timings(path) == apart_from_timings(stored)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["threads", 2])
def test_decisions_do_not_depend_on_where_the_runs_are_made(workers: Any, stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    study = make_study(store=path, seeds=range(6), prune=PLAN)
    with ThreadPoolExecutor(3) as executor:
        study.run(DESIGN, workers=executor if workers == "threads" else workers)
    assert apart_from_timings(path) == apart_from_timings(stored)


@pytest.mark.moderate
def test_the_report_has_no_effect_and_no_average_of_what_was_pruned(stored: Path) -> None:
    study = make_study(store=stored, seeds=range(6), prune=PLAN)
    before = stored.read_bytes()
    found = study.run(DESIGN, workers=0)
    assert stored.read_bytes() == before  # nothing was left to make
    (pruned,) = found.pruned
    name = pruned.variant.name
    assert name not in [row.variant.name for row in found.rows]
    assert len(found.rows) == 3
    assert found.comparisons == 3
    assert found.needed == 7  # 3 * 2 / 2**7 <= 0.05
    (sentence,) = [one for one in found.sentences() if f'"{name}"' in one]
    assert "was pruned after epoch 1: it ranked number 3 of 3 by mean rank over 6 seeds" in sentence
    assert "No effect is reported" in sentence
    assert "by Holm's procedure for 3 comparisons, 1 of them pruned" in " ".join(str(found).split())
    assert f"Pruned, by the mean rank within seeds: {name} after epoch 1 (number 3 of 3)." in " ".join(
        str(found).split()
    )
    assert f"| {name} | pruned | - |" in found.markdown().replace("\\", "")
    assert f"\n{name},0,6,,," in found.csv()
    assert found.csv().splitlines()[-1].endswith(",1")
    assert found.to_dict()["pruned"][0]["variant"] == name
    assert "1 of 3 variants was pruned by successive halving (1 after epoch 1)" in found.methods()
    assert name not in {result.variant for result in study.results(study.plan(DESIGN))}
    (read,) = read_reports(stored).values()
    assert [str(one) for one in read.pruned] == [str(pruned)]
    assert [row.mean for row in read.rows] == [row.mean for row in found.rows]


@pytest.mark.slow
def test_full_runs_of_another_study_do_not_bring_back_what_was_pruned(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    make_study(store=path, seeds=range(6)).run(DESIGN, workers=0)
    study = make_study(store=path, seeds=range(6), prune=PLAN)
    found = study.run(DESIGN, workers=0)
    assert len(found.rows) == 3
    assert len(found.pruned) == 1
    assert len(make_study(store=path, seeds=range(6)).report(DESIGN).rows) == 4
    plan = study.plan(DESIGN)
    assert {run.status for run in plan.runs} == {"finished", "pruned"}
    assert not plan.to_make


@pytest.mark.moderate
def test_the_plan_says_what_will_be_and_what_was_pruned(stored: Path) -> None:
    text = " ".join(str(make_study(store=stored, seeds=range(6), prune=PLAN).plan(DESIGN)).split())
    assert "all 3 variants are trained to the end of epoch 1, and the best 2 to the end" in text
    assert 'pruned after epoch 1: "- ' in text
    assert "0 of 24 runs pending" in text
    assert "with 6 seeds, none of 3 comparisons can be significant (smallest possible p = 0.094); use more" in text
    new = make_study(seeds=range(8), prune=Halving([1, 2], keep=0.3)).plan(DESIGN)
    words = " ".join(str(new).split())
    assert "epoch 1, the best 1 to the end of epoch 2, and the best 1 to the end" in words
    assert "the 48 runs that end early are not counted below" in words  # 4 variants and then 2, of 8 seeds


# ---- decisions ------------------------------------------------------------------------------------------------------


def decided(values: Mapping[str, Sequence[float | None]], halving: Halving, mode: Any = "max") -> list[Pruned]:
    """What is pruned by these values at the end of each epoch; None is a run that failed."""
    seeds = range(len(values["baseline"]))
    variants = [Variant(name) for name in values]
    pruning = Pruning(halving, variants, seeds, lambda one, seed: f"{one.name} {seed}", metric="a", mode=mode)
    lines: dict[str, dict[str, Any]] = {}
    for variant in variants:
        for seed in seeds:
            value = values[variant.name][seed]
            line: dict[str, Any] = {"seed": seed, "error": None if value is not None else "ValueError: no", "steps": 1}
            line |= {"metrics": {} if value is None else {"a": value}, "timing": {"seconds": 1.0, "memory": 1}}
            lines |= dict.fromkeys(pruning.keys(variant, seed), line)
    return list(pruning.decide(lines).pruned)


def test_two_epochs_prune_in_turn_and_never_the_baseline() -> None:
    values = {"baseline": [0.0, 0.0], "a": [0.3, 0.4], "b": [0.5, 0.6], "c": [0.1, 0.2], "d": [0.4, 0.5]}
    found = decided(values, Halving([1, 3]))
    assert [(one.variant.name, one.epoch, one.place, one.of) for one in found] == [
        ("a", 1, 3, 4),
        ("c", 1, 4, 4),
        ("d", 3, 2, 2),
    ]
    assert [one.difference for one in found] == pytest.approx([0.35, 0.15, 0.45])
    lowest = decided(values, Halving([1, 3]), "min")
    assert [one.variant.name for one in lowest] == ["d", "b", "a"]


def test_a_failed_run_ranks_below_any_finished_one() -> None:
    found = decided(
        {"baseline": [0.5] * 3, "a": [0.9, 0.9, None], "b": [0.1, 0.1, 0.1], "c": [0.8, 0.2, 0.2]}, Halving([1])
    )
    # Ranks: a 1 1 3, b 3 3 2, c 2 2 1.
    assert [one.variant.name for one in found] == ["b"]
    assert found[0].rank == pytest.approx(8 / 3)
    found = decided({"baseline": [0.5, None], "a": [None, math.nan], "b": [0.1, 0.1]}, Halving([1]))
    assert [(one.variant.name, one.failed) for one in found] == [("a", 2)]
    assert math.isnan(found[0].difference)


def test_equal_ranks_are_decided_by_the_mean_and_then_by_the_order() -> None:
    found = decided({"baseline": [0.5, 0.5], "a": [0.9, 0.1], "b": [0.8, 0.4]}, Halving([1]))
    assert [one.variant.name for one in found] == ["a"]
    found = decided({"baseline": [0.5, 0.5], "a": [0.1, 0.2], "b": [0.2, 0.1]}, Halving([1]))
    assert [one.variant.name for one in found] == ["b"]


# ---- tests after a choice -------------------------------------------------------------------------------------------


def test_p_values_are_those_of_holm_over_all_planned_comparisons() -> None:
    pruned = [Pruned(without(name), 1, 3, 3, 3.0, -0.1, 8, 0) for name in ("x", "y", "z")]
    names = ["- better", "- nothing", "- x", "- y", "- z"]
    variants = [Variant("baseline"), *(without(name.removeprefix("- ")) for name in names)]
    found = report({"- better": BETTER, "- nothing": NOTHING, "- x": WORSE}, variants, pruned=pruned)
    alone = [
        stats.permutation_test((np.array(one) / 100,), np.mean, permutation_type="samples", n_resamples=np.inf).pvalue
        for one in (BETTER, NOTHING)
    ]
    better, nothing = found.rows[1:]
    assert alone[0] == pytest.approx(2 / 256)
    assert better.adjusted == pytest.approx(5 * alone[0])
    assert nothing.adjusted == pytest.approx(min(1, 4 * alone[1]))
    assert better.verdict == "better"
    assert better.conclusion is not None
    assert better.conclusion.low > 0
    one = report({"- better": BETTER}, [Variant("baseline"), without("better")], level=1 - 0.05 / 5)
    assert one.rows[1].conclusion is not None
    assert (better.conclusion.low, better.conclusion.high) == pytest.approx(
        (one.rows[1].conclusion.low, one.rows[1].conclusion.high)
    )
    few = Report(
        results("baseline", [n / 100 for n in BASE[:6]]) + results("- better", [n / 100 + 0.01 for n in BASE[:6]]),
        variants,
        metric="accuracy",
        mode="max",
        pruned=[*pruned, Pruned(without("nothing"), 1, 3, 3, 3.0, -0.1, 6, 0)],
    )
    assert "the smallest p that 6 pairs can reach is 0.16" in " ".join(few.warnings())


def error_of(studies: int, adjust: Any) -> float:
    """How often anything is found among six variants of nothing, of which the best mean was kept."""
    generator = np.random.default_rng(5)
    wrong = 0
    for _ in range(studies):
        runs = generator.normal(size=(7, 8))
        differences = runs[1:] - runs[0]
        kept = sorted(range(6), key=lambda one: -differences[one].mean())[:1]
        family = [{seed: Fraction(value) for seed, value in enumerate(differences[one])} for one in kept]
        wrong += min(adjust(family)) <= 0.05
    return wrong / studies


@pytest.mark.parametrize("studies", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_more_than_5_percent_of_studies_find_what_is_not_there(studies: int) -> None:
    honest = error_of(studies, lambda family: adjusted_with_pruned(family, family, 5, 0.95)[0])
    assert honest <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / studies)
    if studies == 1000:  # what a family of those that are left alone would do
        assert error_of(studies, step_down) > 0.05 + 2 * math.sqrt(0.05 * 0.95 / studies)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_refused() -> None:
    for epochs, error, what in (
        (3, TypeError, r"Halving\(epochs=3\): expected epoch counts in increasing order"),
        ([], TypeError, r"Halving\(epochs=\[\]\)"),
        ([3, 1], ValueError, r"Halving\(epochs=\[3, 1\]\): expected epoch counts"),
        ([0], ValueError, "epochs"),
    ):
        with pytest.raises(error, match=what):
            Halving(epochs)  # type: ignore[arg-type]
    for keep, error in ((0, ValueError), (1, ValueError), ("half", TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"Halving\(keep="):
            Halving([1], keep=keep)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Study\(prune=\[1, 3\]\): expected a pruning plan, such as Halving"):
        make_study(prune=[1, 3])
    with pytest.raises(ValueError, match=r"Study\(prune=..., looks=...\)"):
        make_study(prune=PLAN, looks=[7, 10], seeds=range(10))
    assert repr(Halving([1, 3], keep=0.25)) == "Halving([1, 3], keep=0.25)"


def late(seed: int, rate: float) -> Any:
    """Validates after the second epoch only."""
    model = nn.Linear(2, 1)
    update = Update.supervised(mse_loss, partial(torch.optim.SGD, lr=rate))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(loss=Average(mse_loss)))
    trainer = Engine(update, model=model, seed=seed)
    trainer.attach(Validation(evaluator, builds.data(1000), every="2ep", prefix="val_"))
    return trainer, builds.train


@pytest.mark.moderate
def test_an_epoch_without_the_metric_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"has no metric 'val_loss' at the end of epoch 1; choose epochs that end"):
        make_study(late, prune=PLAN).run(Variants({"rate": 0.1}, rate=[0.01, 0.03]), workers=0)


def late_and_long(seed: int, rate: float) -> Any:
    trainer, _ = late(seed, rate)
    return trainer, lambda engine: engine.run(builds.data(0), max_epochs=4)


@pytest.mark.moderate
def test_a_metric_of_an_earlier_epoch_decides_nothing() -> None:
    message = r"last measured 'val_loss' in epoch 2, but the pruning decision is made after epoch 3; choose"
    with pytest.raises(ValueError, match=message):
        make_study(late_and_long, prune=Halving([3])).run(Variants({"rate": 0.1}, rate=[0.01, 0.03]), workers=0)


@pytest.mark.moderate
def test_a_failed_run_is_made_again_only_when_asked_and_may_change_the_decision(tmp_path: Path) -> None:
    build = partial(builds.failing, folder=str(tmp_path))
    path = tmp_path / "store.jsonl"

    def run(retry: bool) -> Report:
        return make_study(build, store=path, prune=PLAN).run(DESIGN, workers=0, retry_failed=retry)

    first = run(retry=False)
    assert [(one.variant.name, one.failed) for one in first.pruned] == [("- gradient_noise", 1)]
    (tmp_path / "mended").touch()
    assert [str(one) for one in run(retry=False).pruned] == [str(one) for one in first.pruned]
    again = run(retry=True)
    assert all(one.failed == 0 for one in again.pruned)
    marked = {line["variant"] for line in lines_of(path) if "pruned" in line}
    assert marked == {one.variant.name for one in again.pruned}


@pytest.mark.moderate
def test_epochs_that_no_run_reaches_are_an_error() -> None:
    with pytest.raises(ValueError, match="all runs ended before epoch 5; the longest run ended after epoch 2"):
        make_study(prune=Halving([5])).run(DESIGN, workers=0)


@pytest.mark.moderate
def test_effects_of_a_design_of_which_a_part_was_pruned_are_refused() -> None:
    factors = ["gradient_clipping", "gradient_noise", "ema"]
    for design in (FractionalFactorial(factors, resolution=3), Factorial(factors[:2])):
        found = make_study(seeds=range(2), prune=PLAN).run(design, workers=0)
        assert any("No factor effects are reported" in one for one in found.warnings())
        with pytest.raises(ValueError, match=r"effects\(\): .* pruned, but effects require the runs of all variants"):
            found.effects()
    cumulative = Cumulative(factors)
    found = make_study(seeds=range(2), prune=PLAN).run(cumulative, workers=0)
    with pytest.raises(ValueError, match=r"contributions\(\): .* pruned, but effects require the runs of all variants"):
        found.contributions(cumulative)


@pytest.mark.moderate
def test_a_variant_that_a_retry_brings_back_is_trained_to_the_end_at_once(tmp_path: Path) -> None:
    mended = tmp_path / "mended"

    def build(seed: int) -> Any:
        engine = builds.composed(seed)

        @engine.on(Events.ITERATION_COMPLETED(once=2))
        def fail(engine: Engine) -> None:
            if not engine.handlers["gradient_clipping"].enabled and not mended.exists():
                raise ValueError("no luck")

        return engine, builds.train

    study = make_study(build, prune=Halving([1], keep=0.3))
    assert "- gradient_clipping" in [one.variant.name for one in study.run(DESIGN, workers=0).pruned]
    mended.touch()
    again = study.run(DESIGN, workers=0, retry_failed=True)
    assert [row.variant.name for row in again.rows] == ["baseline", "- gradient_clipping"]
    assert all(row.finished == row.planned for row in again.rows)


@pytest.mark.slow
def test_runs_that_began_with_other_data_decide_nothing(tmp_path: Path) -> None:
    path, scale = tmp_path / "store.jsonl", tmp_path / "scale.txt"
    scale.write_text("1")

    def build(seed: int) -> Any:
        batches = [(x * float(scale.read_text()), y) for x, y in builds.data(0)]
        return builds.composed(seed), lambda engine: engine.run(batches, max_epochs=2)

    make_study(build, store=path, prune=PLAN).run(DESIGN, workers=0)
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if b'"until"' in line]
    path.write_bytes(b"".join(lines))
    scale.write_text("2")
    with pytest.raises(ValueError, match=r"began with different data than a new run would"):
        make_study(build, store=path, prune=PLAN).run(DESIGN, workers=0)
