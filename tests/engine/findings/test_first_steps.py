"""The first steps look at the losses of a run; the later ones are plain steps, and nothing is left of the looking."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from signalfire import Engine, Events, FindingWarning, Handler, Update, UpdateState
from signalfire.core.overrides import Override
from signalfire.handlers import (
    L2,
    GradientAccumulation,
    GradientClipping,
    MicroBatching,
    MixedPrecision,
    SharpnessAwareMinimization,
)
from tests.kit import SGD, assert_same, batches, build, mlp


def codes(engine: Engine) -> list[str]:
    return [one.code for one in engine.findings.of_run()]


def test_a_run_looks_in_its_first_iterations_and_at_none_from_then_on() -> None:
    engine = build(mlp(5, 8, 1))
    looked_at = (Events.FORWARD_STARTED, Events.LOSS_COMPUTED, Events.BACKWARD_COMPLETED)
    due: list[list[bool]] = []

    def note(engine: Engine) -> None:
        due.append([engine.signal(event).due <= engine.state.iteration for event in looked_at])

    engine.connect(Events.GET_BATCH_COMPLETED, note)
    engine.connect(Events.ITERATION_STARTED, lambda engine: None)
    engine.run(batches(8), max_epochs=1)
    assert due[1:] == [[True] * 3] * 4 + [[False] * 3] * 3
    assert not any(engine.signal(event).is_connected for event in looked_at)


class Alone(Handler):
    """Computes the gradients by itself, with or without what it replaces."""

    trains = True

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.calls = calls

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.GRADIENTS, self.compute, by=self)

    def compute(self, engine: Engine, update: UpdateState, compute: Callable[[], None]) -> None:
        if self.calls or engine.state.batch is None:
            compute()
            return
        inputs, targets = engine.state.batch
        loss = mse_loss(engine.model(inputs), targets)
        loss.backward()
        update.raw_loss = update.backward_loss = loss
        update.window.held += 1


def test_what_a_handler_leaves_out_that_computes_gradients_alone_is_reported() -> None:
    def own(engine: Engine) -> None: ...

    def trained(*handlers: Handler, function: bool = False) -> Engine:
        engine = build(mlp(5, 8, 1), *handlers, GradientClipping(1.0))
        if function:
            engine.connect(Events.LOSS_COMPUTED | Events.BACKWARD_STARTED, own)
        engine.run([None, *batches(8)], max_epochs=1)
        return engine

    with pytest.warns(FindingWarning) as caught:
        trained(Alone(calls=False), L2(0.1), MixedPrecision("bf16"), function=True)
    messages = sorted(str(one.message) for one in caught)
    assert [message.split(" has no effect ")[0] for message in messages] == [
        f"W49: update 'main': {name}" for name in ("l2", "mixed_precision", "own")
    ]
    assert (
        "because it relies on Events.LOSS_COMPUTED and Events.BACKWARD_STARTED. Only compute() emits these events, but"
        in messages[2]
    )
    for handlers in ((Alone(calls=True), L2(0.1)), (Alone(calls=False),), (MicroBatching(2), L2(0.1))):
        assert "W49" not in codes(trained(*handlers))


def test_a_run_that_goes_on_is_looked_at_again() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) / (4 if engine.state.epoch > 1 else 1)

    engine = Engine(Update.supervised(loss, SGD), model=mlp(5, 8, 1), seed=0)
    engine.attach(GradientAccumulation(4))
    engine.run(batches(8), max_epochs=1)
    with pytest.warns(FindingWarning, match="W74"):
        engine.run(batches(8), max_epochs=2)


def test_each_update_is_looked_at_and_named() -> None:
    models = nn.ModuleDict({"one": nn.Linear(5, 1), "other": nn.Linear(5, 1)})

    def update(name: str) -> Update:
        def forward(engine: Engine, batch: Any) -> Tensor:
            output: Tensor = models[name](batch[0])
            return output if name == "one" else output.squeeze(-1)

        return Update(
            forward,
            lambda engine, output, batch: (output - batch[1]).square().mean(),
            SGD,
            name,
            lambda engine: models[name].parameters(),
        )

    engine = Engine([update("one"), update("other")], model=models, seed=0)
    with pytest.warns(FindingWarning, match=r"W73: update 'other': .* the output of shape \[4\] is combined") as caught:
        engine.run(batches(4), max_epochs=1)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "handlers",
    [
        [GradientAccumulation(3)],
        [MicroBatching(2)],
        [SharpnessAwareMinimization(0.05)],
        [SharpnessAwareMinimization(0.05), GradientAccumulation(2)],
    ],
)
def test_what_makes_several_gradients_of_a_step_raises_no_alarm(handlers: list[Any]) -> None:
    engine = build(mlp(5, 8, 1, nn.Dropout(0.5)), *handlers)
    engine.run(batches(8), max_epochs=2)
    assert codes(engine) == []


def test_gradients_that_somebody_adds_are_reported_once_and_trained_with() -> None:
    def again(engine: Engine) -> None:
        engine.state.update.backward_loss.backward(retain_graph=True)

    engine = build(mlp(5, 8, 1))
    engine.connect(Events.LOSS_COMPUTED, again)
    with pytest.warns(FindingWarning, match="W75: update 'main': 4 of its 4 parameters have gradients") as caught:
        engine.run(batches(8), max_epochs=1)
    assert len(caught) == 1
    twice = build(mlp(5, 8, 1), optimizer=partial(torch.optim.SGD, lr=0.2))
    twice.run(batches(8), max_epochs=1)
    assert_same(engine.model.state_dict(), twice.model.state_dict())


def test_losses_that_are_kept_for_two_iterations_raise_no_alarm() -> None:
    kept: list[Tensor] = []

    def keep(engine: Engine) -> None:
        loss = engine.state.update.raw_loss
        assert loss is not None
        kept.append(loss)
        del kept[:-2]

    engine = build(mlp(5, 8, 1))
    engine.connect(Events.LOSS_COMPUTED, keep)
    engine.run(batches(8), max_epochs=1)
    assert codes(engine) == []


def test_outputs_in_a_cycle_are_not_held() -> None:
    class Recursive(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            states: dict[int, Tensor] = {}

            def visit(depth: int) -> Tensor:
                states[depth] = super(Recursive, self).forward(inputs) if depth == 0 else visit(depth - 1).sin()
                return states[depth]

            return visit(2)

    build(Recursive(5, 1)).run(batches(8), max_epochs=1)


@pytest.mark.parametrize("streams", ["shared", "separate"])
def test_a_model_that_draws_raises_no_alarm(streams: Any) -> None:
    update = Update.supervised(mse_loss, SGD)
    engine = Engine(update, model=mlp(5, 8, 1, nn.Dropout(0.5)), seed=0, streams=streams)
    engine.run(batches(8), max_epochs=1)
    assert codes(engine) == []


def test_looking_draws_no_number_and_changes_no_bit() -> None:
    ends = []
    for first in (0, 4):
        torch.manual_seed(3)
        engine = build(mlp(5, 8, 1, nn.Dropout(0.5)))
        if first:  # the later iterations, as the first of a run
            engine.run(batches(8), max_iters=first, epoch_length=8)
        engine.run(batches(8), max_epochs=2)
        ends.append((engine.model.state_dict(), torch.get_rng_state()))
    (one, stream), (other, same) = ends
    assert_same(one, other)
    assert torch.equal(stream, same)


class Transposing(nn.Module):
    """As some layers with low-rank updates: a frozen weight is used as a temporary parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(5, 1), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = nn.functional.linear(inputs, nn.Parameter(self.frozen.T)) * self.scale
        return output


def test_a_parameter_that_a_forward_makes_for_one_batch_raises_no_alarm() -> None:
    engine = build(Transposing())
    engine.run(batches(), max_epochs=1)
    assert "W92" not in codes(engine)


def test_an_input_that_a_frozen_model_is_attacked_with_is_trained_to_make_its_loss_large() -> None:
    class Attack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noise = nn.Parameter(torch.zeros(5))
            self.model = mlp(5, 8, 3).requires_grad_(False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.model(inputs + self.noise)  # type: ignore[no-any-return]

    build(Attack(), loss=lambda *given: -nn.functional.cross_entropy(*given)).run(
        batches(2, targets=(), classes=3), max_epochs=1
    )


def test_points_by_which_the_forward_differentiates_are_no_forgotten_parameters() -> None:
    points, model = torch.linspace(0, 1, 8)[:, None].requires_grad_(), mlp(1, 8, 1)

    def residual(engine: Engine, batch: Any) -> Tensor:
        value = model(points)
        (slope,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        return (slope - value).square().mean()  # type: ignore[no-any-return]

    Engine(Update.from_function(residual, SGD), model=model, seed=0).run(range(3), max_epochs=1)


def test_points_are_not_known_where_something_is_compiled() -> None:
    torch.compile(lambda value: value * 2, backend="eager")(torch.ones(2))
    points, model = torch.linspace(0, 1, 8)[:, None].requires_grad_(), mlp(1, 8, 1)

    def residual(engine: Engine, batch: Any) -> Tensor:
        value = model(points)
        (slope,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        return (slope - value).square().mean()  # type: ignore[no-any-return]

    Engine(Update.from_function(residual, SGD), model=model, seed=0).run(range(3), max_epochs=1)


def test_dropout_that_no_forward_computes_leaves_the_generator_where_it_was() -> None:
    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 1)
            self.dropout = nn.Dropout(0.5)

    build(Spare()).run(batches(5), max_epochs=1)
