"""What variants cost, as ratios with intervals; metric against cost, and learning curves."""

from __future__ import annotations

import json
import math
import random
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from signalfire.ablation import LeaveOneOut, Result, cost_table, costs, plot_curves, plot_pareto
from signalfire.ablation.pictures import front
from tests.engine.ablation import builds
from tests.engine.ablation.builds import make_study


def results_of(variants: int, seeds: int = 5) -> list[Result]:
    draws = random.Random(3)
    found = []
    for place in range(variants):
        name = "baseline" if place == 0 else f"- handler_{place}"
        for seed in range(seeds):
            curve = [(epoch, 1 - 0.6**epoch + 0.01 * place * draws.random()) for epoch in range(1, 11)]
            found.append(
                Result(
                    name,
                    seed,
                    0.9 + 0.002 * draws.gauss(place % 7, 1),
                    seconds=draws.uniform(1, 1.3) * (1 + place % 5),
                    memory=int(3e8 + 1e6 * place * draws.random()),
                    steps=100 + place,
                    history={"accuracy": curve},
                )
            )
    return found


def test_ratios_and_intervals_are_those_of_the_logarithms() -> None:
    results = results_of(4)
    for one in costs(results, level=0.9):
        pairs = [
            (getattr(own, one.what), getattr(other, one.what))
            for own in results
            for other in results
            if own.variant == one.variant and other.variant == "baseline" and own.seed == other.seed
        ]
        logs = np.log([own for own, _ in pairs]) - np.log([other for _, other in pairs])
        assert one.ratio == pytest.approx(stats.gmean([own / other for own, other in pairs]), rel=1e-12)
        assert one.n == 5
        if one.what == "steps":
            assert math.isnan(one.low)  # equal ratios have no spread
            continue
        interval = stats.ttest_1samp(logs, 0).confidence_interval(0.9)
        assert (one.low, one.high) == pytest.approx(tuple(np.exp(interval)), rel=1e-9)


def test_failed_runs_and_seeds_without_a_pair_do_not_count() -> None:
    results = [Result("baseline", 0, 1.0, seconds=2.0), Result("baseline", 1, 1.0, seconds=2.0)]
    results += [Result("- ema", 0, None, seconds=9.0, error="E"), Result("- ema", 1, 1.0, seconds=1.0)]
    results += [Result("- ema", 2, 1.0, seconds=7.0)]
    assert [(one.ratio, one.n) for one in costs(results) if one.what == "seconds"] == [(0.5, 1)]
    assert cost_table(costs(results)).splitlines()[2].split() == ["-", "ema", "0.50", "-", "-"]
    with pytest.raises(ValueError, match="this variant has no runs; available variants: baseline, - ema"):
        costs(results, baseline="base")


def test_only_what_nothing_beats_is_on_the_front() -> None:
    points = {"a": (1.0, 0.5), "b": (2.0, 0.7), "c": (2.0, 0.6), "d": (3.0, 0.7), "e": (4.0, 0.9)}
    assert front(points, "max") == ["a", "b", "e"]
    assert front(points, "min") == ["a"]
    assert front({}, "max") == []


@pytest.mark.moderate
@pytest.mark.parametrize("variants", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_pictures_are_drawn(variants: int, tmp_path: Path) -> None:
    results = results_of(variants)
    plot_pareto(results, tmp_path / "pareto.png", metric="accuracy", mode="max")
    plot_curves(results, tmp_path / "curves.png", metric="accuracy")
    for name in ("pareto.png", "curves.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(
        KeyError, match="has a curve of this metric; metrics with curves: accuracy; did you mean 'accuracy'"
    ):
        plot_curves(results, tmp_path / "x.png", metric="acuracy")
    with pytest.raises(ValueError, match="cost='money'"):
        plot_pareto(results, tmp_path / "x.png", metric="accuracy", mode="max", cost="money")  # type: ignore[arg-type]


@pytest.mark.moderate
def test_a_panel_has_the_whole_name_of_its_variant(tmp_path: Path) -> None:
    names = {f"- handler_{place}": f"- gradient_clipping, + label_smoothing, dropout={place}" for place in (1, 2)}
    results = [replace(one, variant=names.get(one.variant, one.variant)) for one in results_of(3)]
    plot_curves(results, tmp_path / "curves.svg", metric="accuracy")
    titles = re.findall(r"<!-- (.*?) -->", (tmp_path / "curves.svg").read_text())
    for name in names.values():
        assert all(line in titles for line in textwrap.wrap(name, 30))


@pytest.mark.moderate
def test_histories_are_in_the_store_as_the_metrics_were_at_each_epoch(tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    study = make_study(seeds=[1], store=store)
    study.run(LeaveOneOut(["ema"]), workers=0)
    lines = {line["variant"]: line for line in map(json.loads, store.read_text().splitlines())}
    engine = builds.composed(1)
    engine.streams = "separate"
    seen = []
    from signalfire import Events, Phase, seed_everything

    seed_everything(1)
    engine = builds.composed(1)
    engine.streams = "separate"
    engine.connect(
        Events.EPOCH_COMPLETED,
        lambda engine: seen.append([engine.state.epoch, engine.state.metrics["val_loss"]]),
        phase=Phase.PERSIST,
    )
    builds.train(engine)
    assert lines["baseline"]["history"] == {"val_loss": seen}
    assert len(seen) == 2
    (result, _) = study.results(study.plan(LeaveOneOut(["ema"])))
    assert [list(point) for point in result.history["val_loss"]] == seen


@pytest.mark.slow
def test_the_curve_of_a_long_run_is_thinned_out_and_keeps_its_end() -> None:
    def run(engine: object) -> None:
        engine.run(builds.data(0)[:1], max_epochs=450)  # type: ignore[attr-defined]

    study = make_study(builds.composed, run=run, seeds=[0])
    study.run(LeaveOneOut(["ema"]), workers=0)
    (result, _) = study.results(study.plan(LeaveOneOut(["ema"])))
    curve = result.history["val_loss"]
    assert len(curve) <= 200
    assert [epoch for epoch, _ in curve] == [*range(4, 450, 4), 450]
    assert curve[-1][1] == result.value
