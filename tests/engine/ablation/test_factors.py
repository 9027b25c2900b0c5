"""Variants of what build takes: architecture, optimizer, anything; and effects that are those of least squares."""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from signalfire import Engine, Update
from signalfire.ablation import LeaveOneOut, Study, Variants, effects
from signalfire.ablation.report import Report
from signalfire.ablation.results import Result
from signalfire.handlers import Average, GradientClipping, Metrics
from tests.kit import batches

DESIGN = Variants({"width": 64, "depth": 2}, factorial=True, width=[32], depth=[3, 4])


def test_a_design_changes_one_argument_at_a_time_or_all() -> None:
    alone = Variants({"width": 64, "depth": 2, "data": "all"}, width=[32, 128], depth=[3]).variants([])
    assert [variant.name for variant in alone] == ["baseline", "width = 32", "width = 128", "depth = 3"]
    assert dict(alone[2].arguments) == {"width": 128, "depth": 2, "data": "all"}
    assert all(variant.level == () for variant in alone)
    every = DESIGN.variants([])
    assert len(every) == 6
    assert every[0].level == (("width", "64"), ("depth", "2"))
    assert {variant.name for variant in every} >= {"width = 32, depth = 4", "depth = 3"}


def test_values_without_a_name_of_their_own_are_given_one() -> None:
    design = Variants({"act": nn.ReLU, "rate": (1, 2)}, act={"smooth": lambda: nn.GELU(), "none": None}, rate=[[3, 4]])
    assert [variant.name for variant in design.variants([])[1:]] == ["act = smooth", "act = none", "rate = [3, 4]"]
    assert Variants({"act": nn.ReLU}, act=[nn.GELU]).variants([])[1].name == "act = GELU"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("x",), {"width": [1]}, TypeError, r"Variants\(baseline='x'\)"),
        (({"width": 1},), {}, ValueError, "expected at least one factor"),
        (
            ({"depth": 1},),
            {"width": [2]},
            ValueError,
            r"the baseline has no value for this argument; arguments in the baseline: depth",
        ),
        (({"width": 1},), {"width": 2}, TypeError, "expected a list of alternative values"),
        (({"width": 1},), {"width": []}, TypeError, "expected a list of alternative values"),
        (({"width": "a"},), {"width": "b"}, TypeError, "expected a list of alternative values"),
        (({"width": 1},), {"width": [1]}, ValueError, "two values have the same name"),
        (({"width": 1},), {"width": [2, 2]}, ValueError, "two values have the same name"),
        (({"width": 1},), {"width": [lambda: 2]}, TypeError, r"this value has no name; pass it as \{'name': value\}"),
        (
            ({"width": 1},),
            {"width": list(range(2, 90)), "factorial": True},
            ValueError,
            "89 runs per seed, more than limit=64",
        ),
        (({"width": 1},), {"width": [2], "factorial": 1}, TypeError, "factorial"),
    ],
)
def test_what_is_no_design_is_refused(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Variants(*arguments, **options)


def test_a_two_by_three_design_is_least_squares_with_interactions() -> None:
    generator = random.Random(0)
    variants = DESIGN.variants([])
    results = [
        Result(variant.name, seed, generator.gauss(seed, 1) + 5 * (dict(variant.level)["depth"] == "4"))
        for seed in range(7)
        for variant in variants
    ]
    found = {one.factors: one for one in effects(results, ["width", "depth"], 2, variants=variants)}
    assert list(found) == [
        ("width = 32",), ("depth = 3",), ("depth = 4",), ("width = 32", "depth = 3"), ("width = 32", "depth = 4"),
    ]  # fmt: skip

    # Least squares with an intercept for each seed, and the factors coded as 0 and 1.
    level = {variant.name: dict(variant.level) for variant in variants}
    rows, values = [], []
    for result in results:
        own = level[result.variant]
        width, three, four = own["width"] == "32", own["depth"] == "3", own["depth"] == "4"
        intercepts = [result.seed == seed for seed in range(7)]
        rows.append([*intercepts, width, three, four, width and three, width and four])
        values.append(result.value)
    fitted = np.linalg.lstsq(np.array(rows, dtype=float), np.array(values), rcond=None)[0][7:]
    width, three, four, width_three, width_four = fitted
    expected = [
        width + (width_three + width_four) / 3,
        three + width_three / 2,
        four + width_four / 2,
        width_three,
        width_four,
    ]
    assert [one.comparison.mean for one in found.values()] == pytest.approx(expected, abs=1e-9)
    assert found["depth = 4",].adjusted <= 0.05
    assert found["depth = 4",].name == "depth = 4"


@pytest.mark.moderate
def test_a_report_of_levels_has_effects_and_sentences() -> None:
    variants = DESIGN.variants([])
    generator = random.Random(1)
    results = [
        Result(variant.name, seed, generator.gauss(0, 0.1) + (dict(variant.level)["width"] == "32"))
        for variant in variants
        for seed in range(8)
    ]
    report = Report(results, variants, metric="score", mode="max")
    assert "width = 32 x depth = 3" in str(report)
    assert any(sentence.startswith("width = 32 raises score by 1.") for sentence in report.sentences())
    assert any(sentence.startswith('With "width = 32, depth = 3", score rose by ') for sentence in report.sentences())
    assert report.to_dict()["rows"][1]["variant"]["arguments"]["width"] in ("64", "32")
    missing = Report(results[:8], variants[:1] + variants[2:], metric="score", mode="max", seeds=range(8))
    with pytest.raises(ValueError, match="a combination of levels is missing"):
        missing.effects()


def build(seed: int, *, width: int, optimizer: Any, clip: float = 1.0) -> Any:
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))
    update = Update.supervised(nn.functional.mse_loss, partial(optimizer, lr=0.05))
    trainer = Engine(update, model=model, seed=seed)
    trainer.attach(GradientClipping(max_norm=clip), Metrics(loss=Average()))
    return trainer, lambda engine: engine.run(batches(4), max_epochs=2)


BASE = {"width": 4, "optimizer": torch.optim.SGD}


def make_study(**options: Any) -> Study:
    return Study(build, metric="loss", mode="min", **({"seeds": range(2)} | options))


@pytest.mark.moderate
def test_a_study_builds_each_variant_with_its_arguments() -> None:
    design = Variants(BASE, width=[8], optimizer=[torch.optim.Adam])
    study = make_study()
    report = study.run(design, workers=0)
    assert [row.variant.name for row in report.rows] == ["baseline", "width = 8", "optimizer = Adam"]
    for row in report.rows:
        for seed, value in row.values.items():
            torch.manual_seed(seed)
            engine, run = build(seed, **dict(row.variant.arguments))
            engine.streams = "separate"
            run(engine)
            assert engine.state.metrics["loss"] == value
    assert len({value for row in report.rows for value in row.values.values()}) == 6


@pytest.mark.moderate
def test_stored_runs_are_those_of_the_same_arguments(tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    make_study(store=store).run(Variants(BASE, width=[8]), workers=0)
    more = make_study(store=store).plan(Variants(BASE, width=[8, 16]))
    assert [run.variant.name for run in more.to_make] == ["width = 16"] * 2
    other = make_study(store=store).plan(Variants({**BASE, "clip": 0.5}, width=[8]))
    assert len(other.to_make) == 4
    named = make_study(store=store).plan(Variants(BASE, width={"8": 9}))
    assert [run.variant.name for run in named.to_make] == ["width = 8"] * 2, "the value counts, not its name"


@pytest.mark.slow
def test_workers_make_the_same_runs(tmp_path: Path) -> None:
    design = Variants(BASE, factorial=True, width=[8], optimizer=[torch.optim.Adam])
    found = [make_study().run(design, workers=workers) for workers in (0, 2)]
    assert [row.values for row in found[0].rows] == [row.values for row in found[1].rows]


def test_arguments_that_build_does_not_take_are_named_before_anything_is_trained() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'depth'"):
        make_study().plan(Variants({**BASE, "depth": 1}, depth=[2]))
    with pytest.raises(ValueError, match=r"some variants are invalid(.|\n)*'width = -1'"):
        make_study().plan(Variants(BASE, width=[-1]))
    with pytest.raises(ValueError, match="different variants that are both named 'baseline'; run each design"):
        make_study().plan(Variants(BASE, width=[8]), LeaveOneOut())


def test_every_pair_of_levels_is_a_cell() -> None:
    design = Variants({"a": 1, "b": 1, "c": 1}, factorial=True, a=[2], b=[2, 3], c=[2])
    levels = {variant.level for variant in design.variants([])}
    pairs = itertools.product("12", "123", "12")
    assert levels == {(("a", a), ("b", b), ("c", c)) for a, b, c in pairs}
