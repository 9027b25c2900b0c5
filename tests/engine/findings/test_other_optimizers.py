"""What the user's own optimizers train is not reported as untrained."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from signalfire import Engine, Events, Handler, Update, on

DATA = [(torch.randn(8, 5), torch.randn(8, 3)) for _ in range(4)]


class OwnSteps(Handler):
    """Trains a parameter of the model with its own optimizer."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.parameter, self.optimizer = parameter, Adam([parameter], lr=1e-3)

    @on(Events.ITERATION_COMPLETED)
    def train(self, engine: Engine) -> None:
        self.optimizer.zero_grad()
        self.parameter.square().sum().backward()
        self.optimizer.step()


def by_a_handler() -> Engine:
    model = nn.ModuleDict({"net": nn.Linear(5, 3), "alpha": nn.ParameterList([nn.Parameter(torch.ones(1))])})
    engine = Engine(
        Update(
            lambda engine, batch: engine.model["net"](batch[0]),
            lambda engine, output, batch: F.mse_loss(output, batch[1]),
            SGD(model["net"].parameters(), lr=0.1),
        ),
        model=model,
        seed=0,
    )
    engine.attach(OwnSteps(model["alpha"][0]))  # type: ignore[index]
    return engine


def in_a_step(*, known: bool) -> Engine:
    generator, critic = nn.Linear(5, 5), nn.Linear(5, 1)
    optimizer = Adam(critic.parameters(), lr=1e-3)

    def step(engine: Engine, batch: Any) -> Tensor:
        made = generator(torch.randn(8, 5))
        optimizer.zero_grad()
        (F.softplus(-critic(batch[0])).mean() + F.softplus(critic(made.detach())).mean()).backward()
        optimizer.step()
        return F.softplus(-critic(made)).mean()

    model = {"generator": generator, "critic": critic} if known else generator
    return Engine(Update.from_function(step, Adam(generator.parameters())), model=model, seed=0)


def target_network() -> Engine:
    policy = nn.Linear(5, 3)
    target = copy.deepcopy(policy)

    def step(engine: Engine, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = target(batch[0])
        return F.mse_loss(policy(batch[0]), wanted + batch[1])

    return Engine(Update.from_function(step, Adam(policy.parameters())), model={"policy": policy, "target": target})


def linear_probe() -> Engine:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    return Engine(Update.supervised(F.mse_loss, SGD(model[1].parameters(), lr=0.1)), model=model)


def without_head() -> Engine:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    return Engine(Update.supervised(F.mse_loss, SGD(model[0].parameters(), lr=0.1)), model=model)


def of_an_older_model() -> Engine:
    older = nn.Linear(5, 3)
    return Engine(
        Update.from_function(lambda engine, batch: F.mse_loss(older(batch[0]), batch[1]) + engine.model(batch[0]).mean(),
                             partial(SGD, lr=0.1)),
        model=nn.Linear(5, 3),
    )  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (by_a_handler, []),
        (partial(in_a_step, known=False), []),
        (partial(in_a_step, known=True), []),
        (target_network, []),
        (linear_probe, []),
        (without_head, ["C08"]),
        (of_an_older_model, ["W92"]),
    ],
    ids=["handler", "step", "step of a known model", "target", "probe", "no head", "older model"],
)
def test_only_what_nobody_trains_is_reported(make: Callable[[], Engine], found: list[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make().run(DATA, max_epochs=1)
    assert [str(one.message)[:3] for one in caught if str(one.message)[:3] in ("C08", "W92", "W11")] == found
