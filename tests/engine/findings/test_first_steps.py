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
from signalfire.acts import Override
from signalfire.findings.first_steps import FirstStep
from signalfire.handlers import (
    L2,
    GradientAccumulation,
    GradientClipping,
    MicroBatching,
    MixedPrecision,
    SharpnessAwareMinimization,
)
from signalfire.step import Step
from tests.kit import SGD, assert_same, batches, build, mlp


def codes(engine: Engine) -> list[str]:
    return [one.code for one in engine.findings.of_run()]


def steps_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    made: list[Step] = []
    initial = Step.__init__

    def noted(self: Step, engine: Engine) -> None:
        initial(self, engine)
        made.append(self)

    monkeypatch.setattr(Step, "__init__", noted)
    return made


def test_a_step_looks_in_the_first_iterations_and_is_a_plain_one_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(mlp(5, 8, 1))
    made = steps_of(engine, monkeypatch)
    kinds: list[type[Step]] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: kinds.append(type(made[0])))
    engine.run(batches(8), max_epochs=1)
    assert kinds == [FirstStep] * 4 + [Step] * 4
    assert made[0].look is None


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


def test_what_a_handler_leaves_out_that_computes_gradients_alone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(engine: Engine) -> None: ...

    def trained(*handlers: Handler, function: bool = False) -> Engine:
        engine = build(mlp(5, 8, 1), *handlers, GradientClipping(1.0))
        if function:
            engine.connect(Events.LOSS_COMPUTED | Events.BACKWARD_STARTED, own)
        engine.run([None, *batches(8)], max_epochs=1)
        return engine

    made = steps_of(build(mlp(5, 8, 1)), monkeypatch)
    with pytest.warns(FindingWarning) as caught:
        trained(Alone(calls=False), L2(0.1), MixedPrecision("bf16"), function=True)
    messages = sorted(str(one.message) for one in caught)
    assert [message.split(" receives ")[0] for message in messages] == [
        f"W49: update 'main': {name}" for name in ("l2", "mixed_precision", "own")
    ]
    assert (
        "own receives Events.LOSS_COMPUTED and Events.BACKWARD_STARTED, but 'alone' computes the gradients without"
        in messages[2]
    )
    assert type(made[-1]) is Step
    for handlers in ((Alone(calls=True), L2(0.1)), (Alone(calls=False),), (MicroBatching(2), L2(0.1))):
        assert "W49" not in codes(trained(*handlers))


def test_a_run_that_goes_on_is_looked_at_again() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) / (2 if engine.state.epoch > 1 else 1)

    engine = Engine(Update.supervised(loss, SGD), model=mlp(5, 8, 1), seed=0)
    engine.attach(GradientAccumulation(2))
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
    with pytest.warns(FindingWarning, match=r"W73: update 'other': .* the output, of shape \[4\], meets") as caught:
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
