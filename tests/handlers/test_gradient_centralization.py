"""Gradient centralization against a plain loop with the authors' function."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update
from signalfire.authoring.randomness import derived_seed
from signalfire.distributed import whole_tensor
from signalfire.handlers import (
    FullyShardedDataParallel,
    GradientAccumulation,
    GradientCentralization,
    GradientClipping,
    GradientNoise,
    MixedPrecision,
)
from signalfire.testing import check_handler
from tests import kit
from tests.kit import assert_same, average_gradients, batches, same, windows
from tests.processes import run_together

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.ConvTranspose2d(3, 2, 2),
        nn.Flatten(),
        nn.Linear(2 * 5 * 5, 4),
    )


pictures = partial(batches, 5, (2, 6, 6), 4)


def build(*handlers: Any) -> Engine:
    return kit.build(network(), *handlers, optimizer=SGD, seed=7)


def centralized_gradient(x: Tensor) -> Tensor:
    """As the authors' code has it."""
    if x.dim() > 1:
        x.add_(-x.mean(dim=tuple(range(1, x.dim())), keepdim=True))
    return x


def plain_loop(
    *, window: int = 1, exclude: int | None = None, scaled: bool = False, max_norm: float | None = None
) -> nn.Module:
    model = network()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    iteration = 0
    for _ in range(2):
        for chunk in windows(pictures(), window):
            for x, y in chunk:
                iteration += 1
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    loss = nn.functional.mse_loss(model(x), y)
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            scaler.unscale_(optimizer)
            generator = torch.Generator().manual_seed(derived_seed(7, "gradient_noise", iteration))
            for place, parameter in enumerate(model.parameters()):
                assert parameter.grad is not None
                if scaled:
                    parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3**0.5)
                if place != exclude:
                    centralized_gradient(parameter.grad)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


@pytest.mark.moderate
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(("exclude", "place"), [(None, None), ("5", 6), (["3.weight"], 4)])
def test_weights_equal_a_plain_loop(window: int, exclude: Any, place: int | None) -> None:
    engine = build(GradientCentralization(exclude=exclude), GradientAccumulation(window))
    engine.run(pictures(), max_epochs=2)
    assert_same(engine.model, plain_loop(window=window, exclude=place))
    plain = build(GradientAccumulation(window))
    plain.run(pictures(), max_epochs=2)
    assert not same(engine.model, plain.model)


@pytest.mark.moderate
def test_after_noise_and_before_clipping_on_unscaled_gradients_in_every_order() -> None:
    expected = plain_loop(scaled=True, max_norm=0.1)
    for order in itertools.permutations(range(4)):
        several = [
            GradientNoise(1e-3, gamma=0),
            GradientCentralization(),
            GradientClipping(0.1),
            MixedPrecision("fp16", init_scale=1024.0),
        ]
        engine = build(*(several[place] for place in order))
        engine.run(pictures(), max_epochs=2)
        assert_same(engine.model, expected)


def test_one_update_of_two_and_parameters_that_join_later() -> None:
    models = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}
    means: dict[str, Tensor] = {}

    def update(name: str) -> Update:
        return Update.from_function(
            lambda engine, batch: models[name](batch).square().sum(),
            partial(torch.optim.SGD, lr=0.1),
            name=name,
            parameters=lambda engine: [models[name].weight],
        )

    engine = Engine([update("a"), update("b")], model=models, seed=0, allow=["W10", "W92"])
    engine.attach(GradientCentralization(update="b"))

    @engine.on(Events.OPTIMIZER_STEP_STARTED)
    def look(engine: Engine) -> None:
        for name, one in models.items():
            if one.weight.grad is not None:
                means[name] = one.weight.grad.mean(1).abs().max()

    data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(1))]
    engine.run(data, max_epochs=1, check=False)
    assert means["a"] > 1e-3
    assert means["b"] < 1e-6
    with pytest.raises(KeyError, match="c"):
        engine.attach(GradientCentralization(update="c", name="other"))


def _sharded(distribute: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    engine = kit.build(model, GradientCentralization(), optimizer=SGD)
    if distribute:
        engine.attach(FullyShardedDataParallel())
    engine.run(batches(4, 6, 2), max_epochs=2, check=False)
    return {name: whole_tensor(value) for name, value in engine.weights()["model"].items()}


@pytest.mark.slow
def test_sharded_gradients_are_centralized_by_rows() -> None:
    assert_same(run_together(_sharded, 1, True)[0], _sharded(False))
    first, second = run_together(_sharded, 2, True)
    assert_same(first, second)


def test_sparse_gradients_and_wrong_arguments_are_refused() -> None:
    update = Update.from_function(lambda engine, batch: engine.model(batch).sum(), partial(torch.optim.SGD, lr=0.1))
    for exclude, refused in ((None, True), ("weight", False)):
        engine = Engine(update, model=nn.Embedding(5, 3, sparse=True), seed=0)
        engine.attach(GradientCentralization(exclude=exclude))
        if refused:
            with pytest.raises(TypeError, match=r"'gradient_centralization': a gradient of update 'main' is sparse"):
                engine.run([torch.tensor([1, 1])], max_epochs=1, check=False)
        else:
            engine.run([torch.tensor([1, 1])], max_epochs=1, check=False)
    with pytest.raises(ValueError, match="'gradient_centralization': exclude='nothing' matches no parameter"):
        build(GradientCentralization(exclude="nothing")).run(pictures(), max_epochs=1)
    with pytest.raises(TypeError, match=r"GradientCentralization\(exclude=\[1\]\)"):
        GradientCentralization(exclude=[1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="both 'one' and 'two' control gradient centralization of update 'main'"):
        build(GradientCentralization(name="one"), GradientCentralization(name="two"))


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler() -> None:
    check_handler(build, GradientCentralization, pictures()[:3], max_epochs=2)
