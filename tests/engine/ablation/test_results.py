"""Variants and results are values: compared by what they hold, and never changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from signalfire.ablation import BASELINE, Result, Variant

VARIANT = Variant("- ema", frozenset({"ema"}), (("mix_up", "cutmix"),), (("ema", False),))


def test_variants_with_the_same_content_are_one() -> None:
    again = Variant("- ema", frozenset(["ema"]), (("mix_up", "cutmix"),), (("ema", False),))
    assert len({VARIANT, again}) == 1


@pytest.mark.parametrize("change", [{"name": "ema off"}, {"off": frozenset()}, {"swapped": ()}, {"level": ()}], ids=str)
def test_variants_that_differ_in_anything_are_two(change: dict[str, Any]) -> None:
    assert len({VARIANT, dataclasses.replace(VARIANT, **change)}) == 2


def test_results_share_no_metrics_and_are_not_changed() -> None:
    one, other = Result(BASELINE, 0, 0.5), Result(BASELINE, 1, 0.5)
    one.metrics["loss"] = 0.5
    assert other.metrics == {}
    assert (other.steps, other.seconds, other.memory, other.error) == (0, 0.0, 0, None)
    for value, name in ((one, "value"), (VARIANT, "off")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)
