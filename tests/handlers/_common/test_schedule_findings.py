"""What `check` says about schedules and the lengths of their runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from signalfire.handlers import LRScheduling, warmup
from tests.kit import batches, build, mlp


def found(factory: Any) -> list[str]:
    """The findings about a schedule in a run of 60 steps."""
    engine = build(mlp(5, 8, 1), LRScheduling(factory))
    return [str(one) for one in engine.check(batches(), max_epochs=10) if one.code in ("C05", "C06")]


def held_at_the_end(optimizer: Any) -> SequentialLR:
    parts: list[Any] = [CosineAnnealingLR(optimizer, T_max=40), ConstantLR(optimizer, 0.1, total_iters=10**6)]
    return SequentialLR(optimizer, parts, milestones=[40])


class HeldCosine(CosineAnnealingLR):
    """One that stays at its end."""


@pytest.mark.parametrize(
    "factory",
    [
        warmup(20, CosineAnnealingLR),
        warmup(0.2, CosineAnnealingLR),
        warmup(20, partial(OneCycleLR, max_lr=0.1)),
        warmup(20, partial(PolynomialLR, total_iters=40)),
        warmup(20, warmup(10, CosineAnnealingLR)),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, total_iters=20), CosineAnnealingLR(optimizer, T_max=40)], milestones=[20]
        ),
        held_at_the_end,
        partial(HeldCosine, T_max=30),
    ],
)
def test_a_schedule_that_fits_what_follows_its_warm_up(factory: Any) -> None:
    assert found(factory) == []


def test_what_follows_a_warm_up_is_counted_from_there() -> None:
    (decayed,) = found(warmup(20, partial(ExponentialLR, gamma=0.5)))
    assert "ExponentialLR counts optimizer steps (40 in this run)" in decayed
    assert "only 9e-13 of the initial learning rate is left after them" in decayed  # 0.5 ** 40


def test_a_polynomial_that_ends_early_has_a_rate_of_zero() -> None:
    (ended,) = found(partial(PolynomialLR, total_iters=30))
    assert "the learning rate is 0 for the rest of the run; set this argument to the number" in ended
