"""Gradients that are cleared inside an accumulation window, and those that only look like it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from signalfire import Engine, Events, FindingWarning, Update, allow
from signalfire.handlers import GradientAccumulation, GradientClipping, GradientNoise, SharpnessAwareMinimization
from tests.kit import SGD, batches, build, linear, mlp


@pytest.fixture(autouse=True)
def no_finding_is_reported() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FindingWarning)
        yield


def move_aside(engine: Engine, kept: dict[Tensor, Tensor], *, in_place: bool) -> None:
    """What surgery on the gradients of several tasks does with those of each."""
    for parameter in engine.model.parameters():
        if parameter.grad is None:
            continue
        kept[parameter] = kept.get(parameter, torch.zeros_like(parameter)) + parameter.grad
        if in_place:
            parameter.grad.zero_()
        else:
            parameter.grad = None


def put_back(engine: Engine, kept: dict[Tensor, Tensor], *, in_place: bool) -> None:
    for parameter in engine.model.parameters():
        if in_place and parameter.grad is not None:
            parameter.grad.add_(kept.pop(parameter))
        else:
            parameter.grad = kept.pop(parameter)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("back", [Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED])
@pytest.mark.parametrize("aside", [Events.BACKWARD_COMPLETED, Events.BACKWARD_STARTED, Events.ITERATION_STARTED])
def test_gradients_that_are_moved_aside_and_put_back_before_the_step(
    aside: Events, back: Events, in_place: bool
) -> None:
    engine, kept = build(mlp(5, 8, 1), GradientAccumulation(3)), dict[Tensor, Tensor]()
    engine.connect(aside, lambda engine: move_aside(engine, kept, in_place=in_place))
    engine.connect(back, lambda engine: put_back(engine, kept, in_place=in_place))
    engine.run(batches(), max_epochs=1)


def test_gradients_that_the_last_backward_of_a_window_puts_back() -> None:
    engine, kept = build(mlp(5, 8, 1), GradientAccumulation(3)), dict[Tensor, Tensor]()

    @engine.on(Events.BACKWARD_COMPLETED)
    def gather(engine: Engine) -> None:
        move_aside(engine, kept, in_place=False)
        if engine.state.iteration % 3 == 0:
            put_back(engine, kept, in_place=False)

    engine.run(batches(), max_epochs=1)


@pytest.mark.parametrize("frozen", [False, True])
def test_heads_that_take_turns(frozen: bool) -> None:
    model = nn.ModuleDict({"trunk": linear(5, 8).requires_grad_(not frozen), "a": linear(8, 1), "b": linear(8, 1)})

    def function(engine: Engine, batch: Any) -> Tensor:
        head = model["ab"[engine.state.iteration % 2]]
        return mse_loss(head(model["trunk"](batch[0])), batch[1])

    engine = Engine(Update.from_function(function, SGD), model=model)
    engine.attach(GradientAccumulation(2))
    engine.run(batches(), max_epochs=1)


def test_an_update_that_no_gradient_reaches_has_lost_none() -> None:
    model = mlp(5, 8, 1)

    def function(engine: Engine, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).mean().detach()
        return loss.requires_grad_()

    engine = Engine(Update.from_function(function, SGD), model=model)
    engine.attach(GradientAccumulation(2))
    with allow("W12", "W92"):
        engine.run(batches(), max_epochs=1)
    assert [one.code for one in engine.findings.of_run() if one.code == "W16"] == []


def test_gradients_of_zero_that_are_multiplied_in_place() -> None:
    engine = build(
        linear(5, 1), GradientAccumulation(2), loss=lambda output, target: (output - output.detach()).pow(2).mean()
    )
    engine.connect(Events.BACKWARD_COMPLETED, lambda engine: [p.grad.mul_(2) for p in engine.model.parameters()])
    with allow("W84"):
        engine.run(batches(), max_epochs=1)


def test_a_step_inside_the_backward() -> None:
    model = mlp(5, 8, 1)

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(0.01 * parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    build(model, GradientAccumulation(2)).run(batches(), max_epochs=1)


def zero(engine: Engine) -> None:
    engine.model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("event", [Events.BACKWARD_STARTED, Events.FORWARD_STARTED, Events.ITERATION_COMPLETED])
def test_gradients_that_are_set_to_zero_are_reported_wherever_it_happens(event: Events) -> None:
    engine = build(mlp(5, 8, 1), GradientAccumulation(3), GradientClipping(1.0))
    engine.connect(event, zero)
    with pytest.warns(FindingWarning, match="W16: .* cleared inside an accumulation window of 3 batches"):
        engine.run(batches(), max_epochs=1)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_cleared_after_the_first_backward_of_each_window_are_reported(set_to_none: bool) -> None:
    engine = build(mlp(5, 8, 1), GradientAccumulation(2))

    @engine.on(Events.BACKWARD_COMPLETED)
    def clear(engine: Engine) -> None:
        if engine.state.iteration % 2:
            engine.model.zero_grad(set_to_none)

    with pytest.warns(FindingWarning, match="W16: .* cleared inside an accumulation window of 2 batches"):
        engine.run(batches(), max_epochs=1)


def test_noise_does_not_hide_gradients_that_were_set_to_zero() -> None:
    engine = build(mlp(5, 8, 1), GradientAccumulation(2), GradientNoise(0.1))
    engine.connect(Events.BACKWARD_COMPLETED, zero)
    with pytest.warns(FindingWarning, match="W16: .* cleared inside an accumulation window of 2 batches"):
        engine.run(batches(), max_epochs=1)


@pytest.mark.parametrize("handler", [SharpnessAwareMinimization, lambda: GradientClipping(max_value=1.0)])
def test_a_window_without_gradients_is_reported_whoever_reads_them(handler: Callable[[], Any]) -> None:
    engine = build(mlp(5, 8, 1), handler())
    engine.connect(Events.BACKWARD_COMPLETED, lambda engine: engine.updates[0].optimizer.zero_grad())
    with pytest.warns(FindingWarning, match="W12: .* leave zero_grad\\(\\) to the engine"):
        engine.run(batches(), max_epochs=1)


def test_no_hook_is_left() -> None:
    engine = build(mlp(5, 8, 1), GradientAccumulation(3))
    hooks: list[Any] = []
    engine.connect(
        Events.ITERATION_COMPLETED, lambda engine: hooks.extend(p._backward_hooks for p in engine.model.parameters())
    )
    engine.run(batches(), max_epochs=1)
    assert not any(hooks)
