"""The arguments of constructors that a saved state holds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from signalfire import Handler
from signalfire.core.settings import plain_arguments
from signalfire.handlers import EMA, DeviceTransfer, GradientClipping, LRScheduling


class Taking:
    def __init__(self, *several: Any, **named: Any) -> None: ...


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        ("1ep", "1ep"),
        (None, None),
        (torch.bfloat16, "torch.bfloat16"),
        ((1, 2), [1, 2]),
        ({1: 0.5, "a": object()}, {"1": 0.5}),
        (partial(StepLR, step_size=3), {"function": "StepLR", "args": [], "step_size": 3}),
    ],
)
def test_plain_values_are_kept(value: Any, expected: Any) -> None:
    assert plain_arguments(Taking, (), {"named": value})["named"] == {"named": expected}


@pytest.mark.parametrize("value", [object(), print, torch.ones(2), [object()], list(range(1000)), {1, 2}])
def test_other_values_are_left_out(value: Any) -> None:
    class One:
        def __init__(self, value: Any, other: int = 3) -> None: ...

    assert plain_arguments(One, (value,), {}) == {"other": 3}


def test_defaults_count_as_given_and_the_name_does_not() -> None:
    assert EMA(0.9).settings() == EMA(decay=0.9, every="1step", name="other").settings()
    assert GradientClipping(1.0).settings() == {"max_norm": 1.0, "max_value": None, "norm_type": 2.0, "update": None}
    assert LRScheduling(partial(StepLR, step_size=3)).settings()["scheduler"]["step_size"] == 3


def test_a_device_may_differ() -> None:
    assert DeviceTransfer("cpu").settings() == {}


def test_wrong_arguments_are_the_constructors_to_refuse() -> None:
    class Own(Handler):
        def __init__(self, rate: float) -> None:
            self.rate = rate

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'rate'"):
        Own()  # type: ignore[call-arg]
    assert Own(0.5).settings() == {"rate": 0.5}
