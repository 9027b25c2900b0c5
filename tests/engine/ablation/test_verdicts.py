"""One verdict for each comparison, in a fixed order, that never contradicts its interval."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest

from signalfire.ablation import Study
from signalfire.ablation.failures import Failures
from signalfire.ablation.report import Report
from signalfire.ablation.results import Result, Variant
from signalfire.ablation.verdicts import check_margin, conclude, conclude_failures
from tests.engine.ablation.reports import BETTER, NOTHING, WORSE, report, without


@pytest.mark.parametrize(
    ("interval", "mean", "rejected", "margin", "verdict", "ends", "cut", "sign"),
    [
        ((0.1, 0.3), 0.2, True, None, "better", (0.1, 0.3), False, 1),
        ((-0.3, -0.1), -0.2, True, None, "worse", (-0.3, -0.1), False, -1),
        ((-0.1, 0.3), 0.1, False, None, "undecided", (-0.1, 0.3), False, 0),
        ((0.1, 0.3), 0.2, True, 0.4, "equivalent", (0.1, 0.3), False, 1),
        ((0.1, 0.3), 0.2, True, 0.3, "better", (0.1, 0.3), False, 1),
        ((-0.1, 0.3), 0.1, False, 0.4, "equivalent", (-0.1, 0.3), False, 0),
        ((-0.1, 0.3), 0.1, False, 0.2, "undecided", (-0.1, 0.3), False, 0),
        ((-0.1, 0.3), 0.1, True, None, "better", (0.0, 0.3), True, 1),
        ((-0.3, 0.1), -0.1, True, None, "worse", (-0.3, 0.0), True, -1),
        ((0.1, 0.3), 0.2, False, None, "undecided", (0.0, 0.3), False, 0),
    ],
)
def test_the_order_of_the_verdicts(
    interval: Any, mean: float, rejected: bool, margin: Any, verdict: str, ends: Any, cut: bool, sign: int
) -> None:
    found = conclude(interval, mean, rejected, mode="max", margin=margin)
    assert (found.verdict, (found.low, found.high), found.cut, found.sign) == (verdict, ends, cut, sign)
    other = conclude(interval, mean, rejected, mode="min", margin=margin)
    assert other.verdict == {"better": "worse", "worse": "better"}.get(verdict, verdict)


def test_no_interval_decides_nothing() -> None:
    assert conclude((math.nan, math.nan), math.nan, False, mode="max", margin=1.0).verdict == "undecided"
    assert conclude((-math.inf, math.inf), 1.0, False, mode="max", margin=1.0).verdict == "undecided"


@pytest.mark.parametrize(
    ("total", "ours", "theirs", "mode", "verdict"),
    [
        (9.0, 1, 0, "max", "undecided"),
        (9.0, 0, 1, "max", "better"),
        (9.0, 1, 1, "max", "better"),
        (-9.0, 1, 0, "max", "worse"),
        (-9.0, 0, 1, "max", "undecided"),
        (9.0, 1, 0, "min", "worse"),
        (-9.0, 1, 0, "min", "undecided"),
    ],
)
def test_what_fails_more_often_is_never_better(
    total: float, ours: int, theirs: int, mode: Literal["min", "max"], verdict: str
) -> None:
    assert conclude_failures(total, True, Failures(ours, theirs, 0, 1.0), mode=mode).verdict == verdict
    assert conclude_failures(total, False, Failures(ours, theirs, 0, 1.0), mode=mode).verdict == "undecided"


@pytest.mark.parametrize(
    ("margin", "error"),
    [(0, ValueError), (-1.0, ValueError), (math.inf, ValueError), ("1 %", TypeError), (True, TypeError)],
)
def test_a_margin_that_is_none_is_refused(margin: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"X\(margin="):
        check_margin("X", margin)
    with pytest.raises(error, match=r"Study\(margin="):
        Study(lambda seed: None, metric="loss", margin=margin)  # type: ignore[arg-type, return-value]


def test_equivalence_is_said_with_its_sign() -> None:
    found = report({"- a": NOTHING, "- b": WORSE, "- c": BETTER}, margin=0.03)
    assert [row.verdict for row in found.rows] == [None, "equivalent", "equivalent", "equivalent"]
    nothing, fell, rose = found.sentences()
    assert nothing.startswith(
        "Without a, accuracy is equivalent within 3.0 percentage points (change of 0.1 percentage points, "
    )
    assert nothing.endswith(", 8 seeds).")
    assert fell.endswith(", although it fell.")
    assert rose.endswith(", although it rose.")
    table = str(found)
    assert "verdict" in table.splitlines()[0]
    assert table.count("equivalent") >= 3
    close = report({"- a": NOTHING, "- b": WORSE}, margin=0.005)
    assert [row.verdict for row in close.rows[1:]] == ["undecided", "worse"]
    assert "; it may differ by 0.5 percentage points or more; a difference of " in close.sentences()[0]
    assert close.to_dict()["margin"] == 0.005
    assert close.to_dict()["rows"][2]["verdict"] == "worse"


@pytest.mark.moderate
def test_what_only_a_later_step_finds_has_an_interval_that_is_cut_at_zero() -> None:
    generator = np.random.default_rng(0)
    cut = None
    for _ in range(300):
        found = contradictions(generator, 1, None)[1]
        rows = [row for row in found.rows[1:] if row.conclusion is not None and row.conclusion.cut]
        if rows:
            cut = rows[0]
            break
    assert cut is not None
    assert cut.conclusion is not None
    assert 0 in (cut.conclusion.low, cut.conclusion.high)
    assert cut.verdict in ("better", "worse")
    assert any("bounded at 0 by the correction for multiple comparisons" in sentence for sentence in found.sentences())


def contradictions(generator: np.random.Generator, reports: int, margin: float | None) -> tuple[int, Report]:
    """How many comparisons have a verdict that their interval, their p or their sentence contradicts."""
    wrong = 0
    for _ in range(reports):
        n, k = int(generator.integers(2, 10)), int(generator.integers(1, 6))
        effects = generator.choice([0.0, 0.4, 1.5, -1.5, -3.0], k)
        baseline = generator.normal(size=n)
        runs = [Result("baseline", seed, float(one)) for seed, one in enumerate(baseline)]
        for place, effect in enumerate(effects):
            values = generator.normal(effect, 1, n)
            runs += [Result(f"- {place}", seed, float(one)) for seed, one in enumerate(values)]
        variants = [Variant("baseline"), *(without(str(place)) for place in range(k))]
        mode: Literal["min", "max"] = "max" if generator.random() < 0.5 else "min"
        found = Report(runs, variants, metric="score", mode=mode, margin=margin)
        for row, sentence in zip(found.rows[1:], found.sentences(), strict=True):
            end: Any = row.conclusion
            rejected = row.adjusted is not None and row.adjusted <= 0.05
            above, below = rejected and end.low >= 0, rejected and end.high <= 0
            inside = margin is not None and -margin < end.low and end.high < margin
            expected = "undecided"
            if inside:
                expected = "equivalent"
            elif above or below:
                expected = "better" if above == (mode == "max") else "worse"
            wrong += end.verdict != expected
            wrong += not rejected and not end.low <= 0 <= end.high
            wrong += end.verdict in ("better", "worse") and end.low < 0 < end.high
            wrong += ("rose by" in sentence) != (expected in ("better", "worse") and above)
            wrong += ("fell by" in sentence) != (expected in ("better", "worse") and below)
            wrong += ("equivalent" in sentence) != (expected == "equivalent")
    return wrong, found


@pytest.mark.moderate
@pytest.mark.parametrize("margin", [None, 1.0])
def test_no_verdict_contradicts_its_interval(margin: float | None) -> None:
    assert contradictions(np.random.default_rng(1), 60, margin)[0] == 0


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("margin", [None, 0.8, 2.5])
def test_in_10000_reports_no_verdict_contradicts_its_interval(margin: float | None) -> None:
    assert contradictions(np.random.default_rng(2), 3400, margin)[0] == 0
