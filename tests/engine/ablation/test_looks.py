"""Planned looks: what they refuse, what they find early, and how seldom they err."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from signalfire.ablation import LeaveOneOut, Study
from signalfire.ablation.joint import intervals, step_down
from signalfire.ablation.looks import Looks, Sequential
from signalfire.ablation.plot import draw
from signalfire.ablation.report import Report
from signalfire.ablation.results import Result, Variant
from tests.engine.ablation import builds
from tests.engine.ablation.builds import make_study
from tests.engine.ablation.reports import without
from tests.engine.ablation.test_joint import draws, family

PLAN = [7, 10, 14, 20]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        (
            [5, 10],
            ValueError,
            "with 5 seeds, no result can be significant at this look; use at least 7",
        ),
        (
            [6, 20],
            ValueError,
            "with 6 seeds, no result can be significant at this look; use at least 7",
        ),
        ([2, 3], ValueError, "with 2 seeds, no result .*; omit the look at 2 seeds"),
        ([8], ValueError, "expected two or more increasing numbers"),
        ([8, 8], ValueError, "expected two or more increasing numbers"),
        ([8, 40], ValueError, "exact only up to 20 seeds"),
        (8, TypeError, "expected numbers of seeds, such as"),
        ([8.5, 10], TypeError, "looks"),
    ],
)
def test_a_look_at_which_nothing_can_be_found_is_refused(sizes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Looks(sizes)


def test_the_refused_size_finds_nothing_and_the_smallest_one_does() -> None:
    perfect = dict(enumerate(family([[1 + 0.1 * seed for seed in range(20)]])[0].values()))
    for size in (7, 8):
        found = Sequential(Looks([size, 20]), ["a"])
        assert found.look({"a": {seed: perfect[seed] for seed in range(size)}}, range(size)) == ("a",)
    allowed = math.floor(0.05 * 6 / 20 * 2**5)
    assert allowed == 0


def test_plans_and_seeds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Study\(looks=\[7, 10\]\): the last look uses 10 seeds, but seeds= has 8"):
        make_study(seeds=range(8), looks=[7, 10])
    found = Sequential(Looks([7, 10]), ["a"])
    with pytest.raises(ValueError, match="got 8 seeds, but the next look is at 7 seeds"):
        found.look({"a": {}}, range(8))


def looked(rows: np.ndarray, plan: Sequence[int], names: Sequence[str]) -> Sequential:
    """The looks at differences of these comparisons."""
    found = Sequential(Looks(plan), names)
    every = dict(zip(names, family(rows.tolist()), strict=True))
    while (size := found.next) is not None:
        found.look({name: {seed: every[name][seed] for seed in range(size)} for name in found.undecided}, range(size))
    return found


def test_a_family_that_is_too_large_for_all_intersections_keeps_to_steps_of_added_levels() -> None:
    generator = np.random.default_rng(0)
    rows = draws(generator, 10, [3.0] + [0.0] * 7, "normal")
    found = looked(rows, [8, 10], [str(place) for place in range(8)])
    looks = Looks([8, 10])
    first = step_down(family(rows[:, :8].tolist()))
    assert ("0" in found.decided) == (first[0] <= looks.added(8))
    assert looks.added(8) + looks.added(10) == pytest.approx(0.05)


def simulated(studies: int, plan: Sequence[int], effects: Sequence[float]) -> dict[str, float]:
    """How often a null is found, the share of runs of the fixed design, and how many real differences are found."""
    generator = np.random.default_rng([studies, len(plan)])
    names = [str(place) for place in range(len(effects))]
    wrong, runs, right = 0, 0, 0.0
    for _ in range(studies):
        found = looked(draws(generator, plan[-1], effects, "normal"), plan, names)
        wrong += any(effects[int(name)] == 0 for name in found.decided)
        right += sum(effects[int(name)] != 0 for name in found.decided) / max(1, sum(map(bool, effects)))
        sizes = [found.decided.get(name, plan[-1]) for name in names]
        runs += sum(sizes) + max(sizes)
    fixed = plan[-1] * (len(effects) + 1)
    return {"wrong": wrong / studies, "runs": runs / studies / fixed, "right": right / studies}


def two_errors(studies: int) -> float:
    return 2 * math.sqrt(0.05 * 0.95 / studies)


def unplanned(studies: int, plan: Sequence[int], comparisons: int) -> float:
    """How often a null is found by adding seeds until something is."""
    generator = np.random.default_rng([studies, comparisons])
    wrong = 0
    for _ in range(studies):
        rows = draws(generator, plan[-1], [0.0] * comparisons, "normal")
        wrong += any(min(step_down(family(rows[:, :size].tolist()))) <= 0.05 for size in plan)
    return wrong / studies


@pytest.mark.moderate
@pytest.mark.parametrize("comparisons", [1, 2, 7])
def test_of_all_sign_patterns_of_a_study_at_most_5_percent_find_anything(comparisons: int) -> None:
    rows = draws(np.random.default_rng(comparisons), 9, [0.0] * comparisons, "normal")
    names = [str(place) for place in range(comparisons)]
    found = [
        bool(looked(rows * np.array([1, *signs]), [7, 9], names).decided)
        for signs in itertools.product((1, -1), repeat=8)
    ]
    share = sum(found) / len(found)
    assert share <= 0.05
    # All of what may be spent: 12 of 256 patterns; less where the level is split over the looks.
    assert share == 12 / 256 if comparisons <= 6 else share > 0.02


@pytest.mark.slow
def test_planned_looks_err_as_seldom_as_one_and_stop_early() -> None:
    plan = [7, 9, 11]
    nulls = simulated(300, plan, [0.0] * 3)
    assert nulls["wrong"] <= 0.05 + two_errors(300)
    assert nulls["runs"] > 0.95
    real = simulated(100, plan, [2.0] * 3)
    assert real["right"] > 0.9
    assert real["runs"] < 0.85


@pytest.mark.slow
def test_unplanned_looks_err_too_often() -> None:
    assert unplanned(1000, [8, 10, 12, 14], 1) > 0.05 + two_errors(1000)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("effects", [[0.0] * 5, [2.0, 0, 0, 0, 0], [2.0, 2.0, 2.0, 0, 0]])
def test_over_1000_studies_the_error_of_the_family_is_kept(effects: list[float]) -> None:
    found = simulated(1000, [7, 10, 14], effects)
    assert found["wrong"] <= 0.05 + two_errors(1000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_over_a_plan_of_four_looks_the_error_is_kept() -> None:
    assert simulated(1000, [7, 10, 13, 16], [0.0] * 3)["wrong"] <= 0.05 + two_errors(1000)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_five_large_effects_take_at_most_60_percent_of_the_runs_of_the_last_look() -> None:
    found = simulated(200, PLAN, [2.0] * 5)
    assert found["runs"] <= 0.60
    assert found["right"] >= 0.99


# ---- studies --------------------------------------------------------------------------------------------------------


def decided(seeds: int, looks: Looks | None, values: dict[str, Sequence[float | None]], **options: Any) -> Report:
    runs = [
        Result(name, seed, value, error=None if value is not None else "ValueError: boom")
        for name, those in values.items()
        for seed, value in enumerate(those)
    ]
    variants = [Variant("baseline"), *(without(name[2:]) for name in values if name != "baseline")]
    return Report(runs, variants, metric="score", mode="max", seeds=range(seeds), looks=looks, **options)


BASE = [0.1 * (seed * 7 % 5) for seed in range(10)]
LOWER = [one - 1 - 0.05 * (seed % 3) for seed, one in enumerate(BASE)]
SAME = [one + (-1) ** seed * 0.2 + 0.01 * seed for seed, one in enumerate(BASE)]


@pytest.mark.moderate
def test_a_report_stops_a_variant_at_the_look_that_found_it() -> None:
    looks = Looks([7, 10])
    found = decided(10, looks, {"baseline": BASE, "- a": LOWER[:7], "- b": SAME})
    baseline, a, b = found.rows
    assert (baseline.planned, a.planned, b.planned) == (10, 7, 10)
    assert (a.look, a.verdict, a.missing) == (7, "worse", ())
    assert (b.look, b.verdict) == (10, "undecided")
    assert "p <= 0.05 over all looks, as of the look at 7 seeds" in found.sentences()[0]
    assert "p > 0.05 over all looks, as of the look at 10 seeds" in found.sentences()[1]
    assert "looks at 7 and 10 seeds" in " ".join(str(found).split())
    assert re.search(r"- a .* <=0.05 ", str(found))
    picture = io.StringIO()
    draw(found, picture, "svg")
    assert "7 pairs, p &lt;=0.05" in picture.getvalue()
    assert "10 pairs, p &gt;0.05" in picture.getvalue()
    assert found.warnings() == []
    # What was run beyond the look that decided does not count.
    more = decided(10, looks, {"baseline": BASE, "- a": LOWER, "- b": SAME})
    assert more.rows[1] == a
    assert more.to_dict()["looks"] == [7, 10]


def test_the_intervals_of_a_look_are_at_the_level_that_it_adds() -> None:
    looks = Looks([7, 10])
    found = decided(10, looks, {"baseline": BASE, "- a": LOWER[:7], "- b": SAME})
    rows = family([[one - other for one, other in zip(those, BASE, strict=False)] for those in (LOWER[:7], SAME[:7])])
    low, high = intervals(rows, 1 - looks.added(7))[0]
    conclusion = found.rows[1].conclusion
    assert conclusion is not None
    assert (conclusion.low, conclusion.high) == pytest.approx((low, high))


def test_a_look_whose_runs_are_not_complete_is_not_made() -> None:
    found = decided(10, Looks([7, 10]), {"baseline": BASE, "- a": LOWER[:6], "- b": SAME})
    assert [row.verdict for row in found.rows[1:]] == ["undecided", "undecided"]
    assert found.rows[1].missing == (6,)
    assert "No look has been taken yet, because the runs of the first 7 seeds are not complete." in found.warnings()


def test_failed_runs_count_at_a_look() -> None:
    values: list[float | None] = [None, *LOWER[1:7]]
    found = decided(10, Looks([7, 10]), {"baseline": BASE, "- a": values, "- b": SAME})
    assert (found.rows[1].look, found.rows[1].verdict) == (7, "worse")


def test_looks_without_a_plan_are_said_and_so_are_those_beside_it() -> None:
    values: dict[str, Sequence[float | None]] = {"baseline": BASE, "- a": LOWER}
    (said,) = decided(10, None, values, seen=[7, 10]).warnings()
    assert said.startswith(
        "The results were looked at after 7 and 10 seeds, without a plan. Adding seeds until a difference appears"
    )
    assert decided(10, None, values, seen=[3, 10]).warnings() == [], "nothing could be found in three seeds"
    (beside,) = decided(10, Looks([7, 10]), {"baseline": BASE, "- a": LOWER[:7]}, seen=[7, 8]).warnings()
    assert beside.startswith("Some results were looked at after 8 seeds, which was not planned")


@pytest.mark.slow
def test_a_study_makes_no_more_runs_of_what_a_look_has_decided(tmp_path: Path) -> None:
    build = partial(builds.noted, folder=str(tmp_path))
    store = tmp_path / "store.jsonl"
    study = make_study(build, seeds=None, looks=[7, 8], store=store)
    assert study.seeds == tuple(range(8))
    plan = study.plan(LeaveOneOut(["ema", "gradient_clipping"]))
    assert "looks at 7, 8 seeds: a variant gets no further runs once it is found to differ" in str(plan)
    report = study.run(LeaveOneOut(["ema", "gradient_clipping"]), workers=0)
    made = (tmp_path / "made.txt").read_text().splitlines()
    assert len(made) == sum(row.planned for row in report.rows)
    assert {row.look for row in report.rows[1:] if row.verdict != "undecided"} <= {7, 8}
    assert any(row.planned == 7 for row in report.rows[1:]), str(report)
    study.run(LeaveOneOut(["ema", "gradient_clipping"]), workers=0)
    assert (tmp_path / "made.txt").read_text().splitlines() == made, "nothing is made twice"
    again = make_study(build, seeds=None, looks=[7, 8], store=store).report(LeaveOneOut(["ema", "gradient_clipping"]))
    assert str(again) == str(report)


@pytest.mark.moderate
def test_a_study_says_that_it_was_looked_at_before() -> None:
    study = make_study(seeds=range(6))
    assert "looked at" not in str(study.run(LeaveOneOut(["ema"]), workers=0))
    more: Study = make_study(seeds=range(7))
    more.store = study.store
    report = more.run(LeaveOneOut(["ema"]), workers=0)
    assert report.seen == (6, 7)
    assert "The results were looked at after 6 and 7 seeds" in " ".join(str(report).split())
