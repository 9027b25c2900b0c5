"""OptimizerStatistics against what plain PyTorch loops read from the parameter groups before each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from signalfire import Engine, Events, Handler, Update
from signalfire.handlers import (
    CSVLogger,
    GradientAccumulation,
    History,
    LRScheduling,
    OptimizerStatistics,
    ParameterScheduling,
)
from tests import kit
from tests.kit import batches

STEPS = 8
ONE_CYCLE = partial(OneCycleLR, max_lr=0.1, total_steps=STEPS + 2)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = partial(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.98), weight_decay=0.02)
Values = dict[str, float]


def network() -> nn.Sequential:
    return kit.mlp(5, 8, 1, nn.Tanh())


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.RMSprop([{"params": [first], "lr": 0.3}, {"params": others, "momentum": 0.7}], lr=0.1)


def build(*handlers: Handler, optimizer: Callable[..., torch.optim.Optimizer] = SGD) -> Engine:
    return kit.build(network(), *handlers, optimizer=optimizer)


def written(engine: Engine, count: int = STEPS) -> list[tuple[int, Values]]:
    """The metrics by iteration."""
    seen = kit.new_metrics(engine)
    engine.run(batches(count), max_epochs=1)
    return seen


def plain_loop(make: Callable[..., torch.optim.Optimizer], read: Callable[[dict[str, Any]], Values]) -> list[Values]:
    """What the groups hold before each step, under a schedule that also cycles the momentum."""
    model = network()
    optimizer = make(model.parameters())
    scheduler, found = ONE_CYCLE(optimizer), []
    for inputs, targets in batches(STEPS):
        nn.functional.mse_loss(model(inputs), targets).backward()
        found.append(read(optimizer.param_groups[0]))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return found


def of_sgd(group: dict[str, Any]) -> Values:
    return {"learning_rate": group["lr"], "momentum": group["momentum"], "weight_decay": group["weight_decay"]}


def of_adam(group: dict[str, Any]) -> Values:
    momentum, beta2 = group["betas"]
    return {"learning_rate": group["lr"], "momentum": momentum, "beta2": beta2, "weight_decay": group["weight_decay"]}


@pytest.mark.parametrize(("optimizer", "read"), [(SGD, of_sgd), (ADAM, of_adam)], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("every", [1, 3])
def test_the_values_are_those_that_the_steps_of_a_plain_loop_use(optimizer: Any, read: Any, every: int) -> None:
    engine = build(OptimizerStatistics(every=f"{every}st"), LRScheduling(ONE_CYCLE), optimizer=optimizer)
    expected = plain_loop(optimizer, read)
    assert written(engine) == [(step, expected[step - 1]) for step in range(every, STEPS + 1, every)]


def test_a_scheduled_weight_decay_is_that_of_the_step() -> None:
    scheduled = ParameterScheduling("weight_decay", {0: 0.5, 2: 0.25})
    found = written(build(OptimizerStatistics(every="1st"), scheduled), 4)
    assert [values["weight_decay"] for _, values in found] == [0.5, 0.5, 0.25, 0.25]


def test_of_several_groups_each_has_its_own() -> None:
    ((_, found),) = written(build(OptimizerStatistics(every="8st"), optimizer=in_groups))
    assert found == {
        "learning_rate/group0": 0.3, "momentum/group0": 0, "weight_decay/group0": 0,
        "learning_rate/group1": 0.1, "momentum/group1": 0.7, "weight_decay/group1": 0,
    }  # fmt: skip


def test_of_several_updates_each_has_its_own() -> None:
    model = network()

    def update(name: str, place: int, make: Callable[..., torch.optim.Optimizer]) -> Update:
        return Update.supervised(
            nn.functional.mse_loss, make, name=name, parameters=lambda engine: model[place].parameters()
        )

    def found_of(**options: Any) -> Values:
        engine = Engine([update("one", 0, SGD), update("other", 2, in_groups)], model=model, seed=0)
        engine.attach(OptimizerStatistics(every="8st", **options))
        ((_, found),) = written(engine)
        return found

    kinds = ("learning_rate", "momentum", "weight_decay")
    others = {f"{kind}/other/group{i}" for kind in kinds for i in range(2)}
    assert {*found_of()} == {f"{kind}/one" for kind in kinds} | others
    assert {*found_of(update="other")} == others
    with pytest.raises(KeyError, match="third"):
        found_of(update="third")


def test_steps_are_counted_and_skipped_ones_are_not_recorded() -> None:
    engine = build(OptimizerStatistics(every="1st"), GradientAccumulation(2))
    engine.connect(Events.GRADIENTS_READY(once=4), lambda engine: engine.state.update.skip("for the test"))
    assert [iteration for iteration, _ in written(engine)] == [2, 6, 8]


def test_the_history_and_the_loggers_have_all_of_them(tmp_path: Path) -> None:
    engine = build(OptimizerStatistics(every="4st"), history := History(), CSVLogger(tmp_path / "log.csv"))
    written(engine)
    assert history.names == ["learning_rate", "momentum", "weight_decay"]
    text = (tmp_path / "log.csv").read_text()
    assert all(f"train/{name}" in text for name in history.names)


def test_a_rate_that_is_a_tensor_is_recorded_as_it_was_then() -> None:
    rate = torch.tensor(0.1)
    engine = build(OptimizerStatistics(every="8st"), optimizer=partial(torch.optim.SGD, lr=rate))
    engine.run(batches(STEPS), max_epochs=1)
    recorded = engine.state.metrics["learning_rate"]
    rate.fill_(0.5)
    assert isinstance(recorded, Tensor)
    assert recorded.item() == pytest.approx(0.1)


class Signs(torch.optim.Optimizer):
    """Finds its rates itself, as Hugging Face's Adafactor does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None, "weight_decay": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.01 * parameter.grad.sign()


def test_what_an_optimizer_has_not_is_not_recorded() -> None:
    assert written(build(OptimizerStatistics(every="8st"), optimizer=Signs)) == [(8, {"weight_decay": 0.1})]


@pytest.mark.parametrize("wrong", [{"every": "5ep"}, {"every": 0}, {"update": ""}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        OptimizerStatistics(**wrong)
