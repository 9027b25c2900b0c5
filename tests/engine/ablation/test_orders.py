"""Cumulative ablation in both directions, and Shapley values that are those of their definition."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from signalfire.ablation import Cumulative, Design, LeaveOneOut, Shapley
from signalfire.ablation.report import Report
from signalfire.ablation.results import Result

NAMES = ["ema", "mixup", "clip"]
Worth = Callable[[frozenset[str], int], float]


def reported(design: Design, handlers: Iterable[str], worth: Worth, seeds: int = 8, level: float = 0.95) -> Report:
    """A report of runs whose metric is a function of the handlers that are on and of the seed."""
    variants = design.variants([])
    runs = [
        Result(variant.name, seed, worth(frozenset(handlers) - variant.off, seed))
        for variant in variants
        for seed in range(seeds)
    ]
    return Report(runs, variants, metric="score", mode="max", level=level)


def game(on: frozenset[str], seed: int) -> float:
    """Three handlers of which two need each other."""
    value = 1.0 * ("ema" in on) + 4.0 * ({"ema", "mixup"} <= on) - 0.5 * ("clip" in on) * len(on)
    return value + seed + 0.01 * random.Random(f"{sorted(on)} {seed}").gauss(0, 1)


def by_definition(handlers: list[str], worth: Worth, seed: int) -> dict[str, float]:
    """The mean over all orders of what each handler adds."""
    totals = dict.fromkeys(handlers, 0.0)
    for order in itertools.permutations(handlers):
        for place, name in enumerate(order):
            before = frozenset(order[:place])
            totals[name] += worth(before | {name}, seed) - worth(before, seed)
    return {name: total / math.factorial(len(handlers)) for name, total in totals.items()}


def test_exact_values_are_those_of_the_definition_and_add_up() -> None:
    design = Shapley(NAMES)
    report = reported(design, NAMES, game)
    assert len(report.rows) == 8
    found = {one.name: one for one in report.contributions(design)}
    for seed in range(8):
        expected = by_definition(NAMES, game, seed)
        assert {name: one.contrasts[seed] for name, one in found.items()} == pytest.approx(expected, abs=1e-9)
        whole = game(frozenset(NAMES), seed) - game(frozenset(), seed)
        assert sum(one.contrasts[seed] for one in found.values()) == pytest.approx(whole, abs=1e-9)
    assert found["ema"].adjusted == 2 / 2**8
    assert report.sampling_intervals(design)["ema"] == pytest.approx((found["ema"].comparison.mean,) * 2)


@pytest.mark.moderate
def test_sampled_values_have_an_interval_that_holds_the_exact_ones() -> None:
    names = [f"h{place}" for place in range(7)]

    def worth(on: frozenset[str], seed: int) -> float:
        numbers = [int(name[1:]) for name in on]
        return sum(numbers) + 0.5 * ({"h0", "h1"} <= on) * len(on) + seed

    design = Shapley(names, orders=40)
    assert len(design.orders) == 40
    assert all(order[::-1] in design.orders for order in design.orders)
    report = reported(design, names, worth, seeds=2, level=0.999)
    exact = by_definition(names, worth, 0)
    within = report.sampling_intervals(design)
    for one in report.contributions(design):
        low, high = within[one.name]
        assert low - 1e-9 <= exact[one.name] <= high + 1e-9
        assert one.comparison.mean == pytest.approx((low + high) / 2)
    assert sum(one.comparison.mean for one in report.contributions(design)) == pytest.approx(worth(frozenset(names), 0))
    assert Shapley(names, orders=4).orders == Shapley(names, orders=4).orders != Shapley(names, orders=4, seed=1).orders


@pytest.mark.moderate
@pytest.mark.parametrize("part", [0.125, 0.1], ids=["exact", "rounded"])
def test_sampled_orders_that_are_all_equal_give_no_interval(part: float) -> None:
    """They need not be equal in the orders that were not sampled, so an interval of width 0 would claim too much."""
    names = [f"h{place}" for place in range(7)]

    def worth(on: frozenset[str], seed: int) -> float:
        return part * len(on) + ({"h0", "h1", "h2"} <= on)

    for orders in (2, 4, 6):
        design = Shapley(names, orders=orders)
        pairs = list(zip(design.orders[::2], design.orders[1::2], strict=True))
        within = reported(design, names, worth, seeds=2).sampling_intervals(design)
        for name in names:
            middle = [
                added(name, one) + added(name, other) for one, other in pairs
            ]  # of the three that need each other
            low, high = within[name]
            assert low < high if len({*middle}) > 1 else math.isnan(low) and math.isnan(high)
        assert math.isnan(within["h6"][0])


def added(name: str, order: Any) -> bool:
    """Whether it is the last of three handlers that need each other."""
    return max(("h0", "h1", "h2"), key=order.index) == name


def test_cumulative_steps_go_both_ways() -> None:
    design = Cumulative(NAMES)
    report = reported(design, NAMES, game)
    assert [row.variant.name for row in report.rows][3] == "- ema - mixup - clip"
    found = {one.name: one.contrasts[0] for one in report.contributions(design)}
    assert list(found) == [
        "ema added to none",
        "mixup added to ema",
        "clip added to ema + mixup",
        "ema beside mixup + clip",
        "mixup beside clip",
        "clip beside none",
    ]

    def value(*on: str) -> float:
        return game(frozenset(on), 0)

    assert found["ema added to none"] == pytest.approx(value("ema") - value())
    assert found["mixup added to ema"] == pytest.approx(value("ema", "mixup") - value("ema"))
    assert found["clip added to ema + mixup"] == pytest.approx(value(*NAMES) - value("ema", "mixup"))
    assert found["ema beside mixup + clip"] == pytest.approx(value(*NAMES) - value("mixup", "clip"))
    assert found["mixup beside clip"] == pytest.approx(value("mixup", "clip") - value("clip"))
    assert found["clip beside none"] == pytest.approx(value("clip") - value())


@pytest.mark.whole
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Cumulative(["ema"]), ValueError, "expected at least two handlers"),
        (lambda: Cumulative(["ema", "ema"]), ValueError, "a name appears more than once"),
        (lambda: Shapley("ema"), TypeError, "expected a list of names"),
        (lambda: Shapley(["ema"]), ValueError, "expected at least two handlers"),
        (lambda: Shapley(NAMES, orders=4), ValueError, "with 3 handlers, all subsets are run, so orders= does not"),
        (lambda: Shapley(list("abcdefg")), ValueError, "7 handlers have 128 subsets, which is too many to run"),
        (lambda: Shapley(list("abcdefg"), orders=1), ValueError, "orders"),
    ],
)
def test_what_is_no_order_is_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_contributions_of_variants_that_were_not_run_are_refused() -> None:
    report = reported(LeaveOneOut(NAMES), NAMES, game)
    with pytest.raises(ValueError, match="there are no runs of - ema - clip, "):
        report.contributions(Shapley(NAMES))
