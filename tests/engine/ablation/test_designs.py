"""Which variants each design makes, and what it refuses."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, cast

import pytest

from signalfire.ablation import BASELINE, Factorial, LeaveOneOut, OneAtATime, Swap
from signalfire.handlers import CutMix, MixUp

CANDIDATES = ("ema", "mix_up", "swa")


def off(design: Any) -> dict[str, list[str]]:
    return {variant.name: sorted(variant.off) for variant in design.variants(CANDIDATES)}


def test_leave_one_out_switches_each_candidate_off_once() -> None:
    assert off(LeaveOneOut()) == {BASELINE: [], "- ema": ["ema"], "- mix_up": ["mix_up"], "- swa": ["swa"]}


def test_a_group_is_switched_together_and_its_handlers_not_alone() -> None:
    design = LeaveOneOut(groups={"averaging": ["swa", "ema"]})
    assert off(design) == {BASELINE: [], "- mix_up": ["mix_up"], "- averaging": ["ema", "swa"]}


def test_one_at_a_time_starts_from_nothing() -> None:
    assert off(OneAtATime(["swa", "ema"])) == {BASELINE: ["ema", "swa"], "+ swa": ["ema"], "+ ema": ["swa"]}


def test_a_factorial_has_every_combination_once_and_gives_the_levels() -> None:
    variants = Factorial({"averaging": ["ema", "swa"], "mixing": ["mix_up"], "c": ["c"]}).variants(CANDIDATES)
    assert (
        len(variants) == len({variant.name for variant in variants}) == len({variant.off for variant in variants}) == 8
    )
    assert variants[0].name == BASELINE
    assert variants[0].off == frozenset()
    for variant in variants:
        level = dict(variant.level)
        assert list(level) == ["averaging", "mixing", "c"]
        assert ("ema" in variant.off) is ("swa" in variant.off) is not level["averaging"]
        assert ("mix_up" in variant.off) is not level["mixing"]


def test_a_factorial_of_too_many_runs_is_refused_with_their_number() -> None:
    assert len(Factorial([f"h{n}" for n in range(6)]).variants([])) == 64
    with pytest.raises(ValueError, match="7 factors need 128 runs per seed, more than limit=64"):
        Factorial([f"h{n}" for n in range(7)])
    assert len(Factorial([f"h{n}" for n in range(7)], limit=128).variants([])) == 128


def test_a_swap_has_one_variant_for_each_alternative() -> None:
    design = Swap({"mix_up": {"cutmix": CutMix, "less": partial(MixUp, alpha=0.1)}})
    assert [(variant.name, variant.swapped) for variant in design.variants(CANDIDATES)] == [
        (BASELINE, ()),
        ("mix_up = cutmix", (("mix_up", "cutmix"),)),
        ("mix_up = less", (("mix_up", "less"),)),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LeaveOneOut("ema"), "LeaveOneOut(handlers='ema'): expected a list of names"),
        (lambda: LeaveOneOut(["ema", "ema"]), "LeaveOneOut(handlers=['ema', 'ema']): a name appears more than once"),
        (lambda: OneAtATime(cast(Any, [MixUp()])), "expected handler names"),
        (lambda: LeaveOneOut(groups={"all": []}), "LeaveOneOut(groups={'all': []}): the group is empty"),
        (
            lambda: LeaveOneOut(groups=cast(Any, ["ema"])),
            "LeaveOneOut(groups=['ema']): expected a dict that maps group names to lists",
        ),
        (lambda: LeaveOneOut(["ema"], groups={"a": ["ema"]}).variants([]), "'ema' is toggled by both 'ema' and 'a'"),
        (
            lambda: LeaveOneOut(["ema"], groups={"ema": ["swa"]}).variants([]),
            "a handler and a group are both named 'ema'",
        ),
        (lambda: Factorial({"a": ["ema"], "b": ["ema", "swa"]}), "'ema' is toggled by both 'a' and 'b'"),
        (lambda: Factorial([]), "expected at least one factor"),
        (lambda: Swap({}), "Swap(alternatives={})"),
        (lambda: Swap(cast(Any, {"mix_up": CutMix})), "expected a dict that maps names to alternatives"),
        (lambda: Swap(cast(Any, {"mix_up": {"cutmix": CutMix()}})), "each run needs a new handler"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()
