"""What a plan counts, what it costs, and how it reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import pytest

from signalfire.ablation import BASELINE, Plan, PlannedRun, Variant
from signalfire.ablation.plan import duration

Status = Literal["finished", "failed", "missing"]

VARIANTS = (
    Variant(BASELINE),
    Variant("- ema", frozenset({"swa", "ema"})),
    Variant("mix_up = cutmix", frozenset({"ema"}), (("mix_up", "cutmix"),)),
)


def plan(*statuses: Iterable[Status], retry: bool = False, seconds: float | None = 40.0) -> Plan:
    """The status of each variant for one seed after the other; failed ones are made again to ``retry``."""
    runs = tuple(
        PlannedRun(
            variant,
            seed,
            f"{variant.name} {seed}",
            status,
            status == "missing" or (retry and status == "failed"),
            seconds,
        )
        for seed, of_seed in enumerate(statuses)
        for variant, status in zip(VARIANTS, of_seed, strict=True)
    )
    return Plan(VARIANTS, tuple(range(len(statuses))), runs)


def test_a_plan_reads_as_a_table_with_its_cost() -> None:
    some = plan(("finished", "failed", "finished"), ("finished", "missing", "missing"))
    assert str(some).splitlines() == [
        "variant          finished  failed  pending  off or replaced",
        "baseline                2       0        0  -",
        "- ema                   0       1        1  ema, swa",
        "mix_up = cutmix         1       0        1  ema, mix_up = cutmix",
        "power: with 2 seeds, no effect can be significant (smallest possible p = 0.5); use 6 or more seeds",
        "3 variants x 2 seeds: 2 of 6 runs pending, estimated time if run sequentially: 1 min 20 s",
    ]


def test_only_the_runs_to_make_are_listed_and_paid_for() -> None:
    statuses: tuple[Status, Status, Status] = ("finished", "failed", "missing")
    assert [run.variant.name for run in plan(statuses).to_make] == ["mix_up = cutmix"]
    again = plan(statuses, retry=True)
    assert [run.variant.name for run in again.to_make] == ["- ema", "mix_up = cutmix"]
    assert again.seconds == 80.0


def test_one_run_of_unknown_cost_makes_the_whole_cost_unknown_unless_it_is_there_already() -> None:
    unknown = plan(("finished", "missing", "missing"), seconds=None)
    known = plan(("finished", "missing", "missing"))
    mixed = Plan(VARIANTS, (0,), (*unknown.runs[:2], known.runs[2]))
    assert mixed.seconds is None
    assert str(mixed).endswith(": unknown")
    stored = Plan(VARIANTS, (0,), (unknown.runs[0], *known.runs[1:]))
    assert stored.seconds == 80.0
    assert plan(("finished", "failed", "finished"), seconds=None).seconds == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (9.94, "9.9 s"),
        (10.4, "10 s"),
        (59.7, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (90_061, "25 h 1 min"),
    ],
)
def test_a_duration_is_rounded_before_it_is_split(seconds: float, text: str) -> None:
    assert duration(seconds) == text
