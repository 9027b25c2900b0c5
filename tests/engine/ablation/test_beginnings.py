"""Runs of a study that are equal, or that depend on each other, are reported; others are not."""

from __future__ import annotations

import warnings

import pytest
import torch

from signalfire import FindingWarning
from signalfire.ablation.beginnings import Beginnings, report_equal_runs
from signalfire.ablation.results import Result
from signalfire.ablation.runs import digest


def test_runs_of_one_seed_that_begin_alike_are_fine_and_others_are_reported_once() -> None:
    beginnings = Beginnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in (0, 1):
            beginnings.compare(seed, (f"weights {seed}", "data"), {"handlers": "a", "updates": "b"})
            beginnings.compare(seed, ())  # a run that failed before it began
            beginnings.compare(seed, (f"weights {seed}", "data"), {"handlers": "a", "updates": "b"})
    with pytest.warns(FindingWarning, match=r"W82: build\(1\) produced different weights than"):
        beginnings.compare(1, ("weights 0", "data"))
    beginnings.compare(1, ("weights 0", "other data"))
    other = Beginnings()
    other.compare(0, ("weights", "data"), {"handlers": "a", "updates": "b"})
    with pytest.warns(FindingWarning, match=r"W82: build\(0\) produced different updates and different data than"):
        other.compare(0, ("weights", "more"), {"handlers": "a", "updates": "c"})


def results(*values: float, variant: str = "baseline", steps: int = 3) -> list[Result]:
    return [Result(variant, seed, value, {"loss": value}, steps) for seed, value in enumerate(values)]


@pytest.mark.parametrize(
    ("found", "reported"),
    [
        (results(0.123456, 0.123456), True),
        (results(0.123456, 0.123457), False),
        (results(1.0, 1.0), False),  # such as an accuracy
        (results(29 / 30, 29 / 30), False),  # of few samples
        (results(0.9666666388511658, 0.9666666388511658), False),  # in single precision
        (results(float("nan"), float("nan")), False),
        (results(0.123456), False),
        (results(0.123456, 0.123456, steps=0), False),  # nothing was trained
        (results(0.123456, 0.123456, variant="- ema") + results(0.1, 0.2), False),
    ],
    ids=str,
)
def test_a_baseline_that_is_the_same_for_each_seed_is_reported(found: list[Result], reported: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report_equal_runs(found)
    assert [str(one.message)[:3] for one in caught] == ["W81"] * reported


def test_a_digest_sees_values_shapes_and_types() -> None:
    zeros = torch.zeros(4)
    others = [torch.ones(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bool)]
    assert digest([zeros]) == digest([zeros.clone()])
    assert len({digest([one]) for one in (zeros, *others)}) == 5
    assert digest([torch.tensor(1.0, dtype=torch.bfloat16), "no tensor"]) == digest(
        [torch.tensor(1.0, dtype=torch.bfloat16)]
    )
