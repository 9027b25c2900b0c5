"""Numbers, names and tables as text: digits that mean something, and nothing cut off or misread."""

from __future__ import annotations

import json
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch

from signalfire.ablation.formats import (
    aligned,
    decimals,
    escaped_markdown,
    latex_number,
    named_value,
    number_text,
    p_text,
    short_text,
    size_text,
    without_nan,
)
from signalfire.ablation.report import Report
from signalfire.ablation.results import Result, Variant
from tests.engine.ablation.reports import WORSE, report, without


@pytest.mark.parametrize(
    ("spreads", "values", "digits"),
    [
        ([0.016, 0.014, 5.0], [0.91], 3),  # two digits of the median; one wild variant does not hide them
        ([2.5], [91.0], 1),
        ([250.0], [90_000.0], 0),
        ([0.0, nan, inf, 0.02], [0.9], 3),
        ([0.0], [0.5], 4),  # without any spread, a hundredth of the largest value
        ([], [], 1),
        ([1e-5], [0.9], 6),
        ([1e-6], [0.9], None),
        ([1.0], [-100_000.0], None),
    ],
)
def test_decimals_show_two_digits_of_the_spread(spreads: list[float], values: list[float], digits: int | None) -> None:
    assert decimals(spreads, values) == digits


def test_a_number_that_rounds_to_zero_has_no_sign() -> None:
    assert [number_text(number, 2) for number in (-0.004, -0.006, 0.0)] == ["0.00", "-0.01", "0.00"]
    assert [number_text(number, 2) for number in (nan, -1234567.0)] == ["-", "-1.23e+06"]
    assert number_text(0.000012345, None) == "1.23e-05"


def test_a_small_p_is_a_bound_and_never_zero() -> None:
    assert [p_text(p) for p in (None, 0.001, 0.00099, 1.0)] == ["-", "0.001", "<0.001", "1.000"]
    assert [p_text(p, "= ") for p in (0.0312, 1e-9)] == ["= 0.031", "< 0.001"]


def test_seconds_steps_and_sizes_are_short() -> None:
    assert [short_text(number) for number in (nan, 0.04, 99.94, 100.4, 1e7)] == ["-", "0.0", "99.9", "100", "1.00e+07"]
    assert short_text(12.6, whole=True) == "13"
    assert [size_text(memory) for memory in (0, 9_999_000_000, 10**10)] == ["-", "9999 MB", "10.0 GB"]


def test_markdown_cells_are_one_line() -> None:
    assert escaped_markdown("a\n  b*<c>`[d]\\") == r"a b\*\<c\>\`\[d\]\\"


@pytest.mark.parametrize(
    ("cell", "latex"),
    [("-", "--"), ("[-0.02, -.5]", "[$-$0.02, $-$.5]"), ("-1.2e-05", "$-$1.2e$-$05"), ("<0.001", "$<$0.001")],
)
def test_every_minus_of_a_number_is_one_in_latex(cell: str, latex: str) -> None:
    assert latex_number(cell) == latex


def test_what_json_cannot_hold_is_none_however_deep_it_is() -> None:
    content = without_nan({"a": [1.5, (nan, {"b": -inf})], "c": 3, "d": "nan", "e": True})
    assert content == {"a": [1.5, [None, {"b": None}]], "c": 3, "d": "nan", "e": True}
    json.dumps(content, allow_nan=False)


def test_numbers_are_aligned_right_and_names_left() -> None:
    assert aligned([["variant", "runs"], ["a", "8/8"], ["", "10/10"]]).splitlines() == [
        "variant    runs",
        "---------------",
        "a           8/8",
        "          10/10",
    ]


def test_long_names_are_wrapped_and_not_cut() -> None:
    name = "- " + " - ".join(f"handler_number_{number}" for number in range(6))
    table = str(report({name: WORSE}, [Variant("baseline"), Variant(name)])).split("\n\n")[0]
    for number in range(6):
        assert f"handler_number_{number}" in table
    assert max(map(len, table.splitlines())) <= 120


def test_a_table_that_is_too_wide_goes_on_below_itself() -> None:
    runs = [Result("baseline", seed, 1e9 + seed, steps=10**6, seconds=1e5, memory=10**11) for seed in range(6)]
    runs += [Result("- ema", seed, -1e9 - seed**2, steps=10**6, seconds=1e5, memory=10**11) for seed in range(6)]
    metric = "mean_average_precision_at_fifty_percent"
    found = str(Report(runs, [Variant("baseline"), without("ema")], metric=metric, mode="max"))
    assert max(map(len, found.splitlines())) <= 120
    assert found.count("- ema ") >= 2
    assert "100.0 GB" in found
    assert metric in found


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (0.1, "0.1"),
        (None, "None"),
        ((4, 4), "(4, 4)"),
        (torch.optim.SGD, "SGD"),
        (torch.nn.functional.relu, "relu"),
        (lambda: None, None),
        (partial(torch.optim.SGD, lr=0.1), None),
    ],
    ids=range(7),
)
def test_values_in_names_of_variants_are_called_as_a_reader_would(value: Any, name: str | None) -> None:
    assert named_value(value) == name
