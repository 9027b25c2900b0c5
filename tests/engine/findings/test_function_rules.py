"""The rules of `Engine.check` about users' functions that clip."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.utils import clip_grad_norm_

from signalfire import AnyEvent, Engine, Events
from signalfire.handlers import GradientAccumulation
from tests.kit import batches, build, linear


def clip(engine: Engine) -> None:
    clip_grad_norm_(engine.model.parameters(), 1.0)


def found(event: AnyEvent, *handlers: Any) -> list[str]:
    engine = build(linear(5, 1), *handlers)
    engine.connect(event, clip)
    return [one.code for one in engine.check(batches(), max_epochs=1) if one.code == "C26"]


@pytest.mark.parametrize(
    "event",
    [
        Events.ITERATION_STARTED,
        Events.LOSS_COMPUTED,
        Events.OPTIMIZER_STEP_COMPLETED(every=2),
        Events.ITERATION_COMPLETED,
        Events.EPOCH_COMPLETED,
    ],
)
def test_a_function_that_clips_where_there_are_no_gradients_is_found(event: AnyEvent) -> None:
    assert found(event) == ["C26"]


@pytest.mark.parametrize("event", [Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED])
def test_one_that_clips_those_of_the_step_is_not(event: AnyEvent) -> None:
    assert found(event) == []


def test_in_a_window_each_part_would_be_clipped() -> None:
    assert found(Events.BACKWARD_COMPLETED, GradientAccumulation(2)) == ["C26"]
    assert found(Events.BACKWARD_COMPLETED, GradientAccumulation(1)) == []
    assert found(Events.GRADIENTS_READY, GradientAccumulation(2)) == []
