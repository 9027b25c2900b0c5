"""GradientNoise against plain PyTorch loops that draw the same numbers."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update
from signalfire.authoring.randomness import derived_seed
from signalfire.handlers import GradientAccumulation, GradientClipping, GradientNoise, MixedPrecision
from signalfire.testing import check_handler
from tests import kit
from tests.kit import average_gradients, batches, mlp, quick, same, windows

Batches = list[tuple[Tensor, Tensor]]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.Tanh(), nn.Dropout(0.3))


def build(seed: int = 7) -> Engine:
    return kit.build(network(), optimizer=SGD, seed=seed)


def plain_loop(
    eta: float | None,
    gamma: float = 0.55,
    *,
    window: int = 1,
    epochs: int = 2,
    max_norm: float | None = None,
    scaled: bool = False,
    skipped: int | None = None,
) -> nn.Sequential:
    model = network()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    data, iteration, step = batches(), 0, 0
    torch.manual_seed(5)  # dropout's
    for _ in range(epochs):
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                iteration += 1
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            scaler.unscale_(optimizer)
            if eta is not None:
                generator = torch.Generator().manual_seed(derived_seed(7, "gradient_noise", iteration))
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.grad.add_(noise, alpha=math.sqrt(eta / (1 + step) ** gamma))
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if iteration != skipped:
                scaler.step(optimizer)
                step += 1
            scaler.update()
            optimizer.zero_grad()
    return model


def trained(*handlers: Any, epochs: int = 2) -> Engine:
    engine = build()
    engine.attach(*handlers)
    torch.manual_seed(5)
    engine.run(batches(), max_epochs=epochs)
    return engine


@pytest.mark.parametrize(("eta", "gamma"), [(0.3, 0.55), (1.0, 0.0), (0.01, 2)])
@pytest.mark.parametrize("window", [1, 4])
def test_weights_equal_a_plain_loop(eta: float, gamma: float, window: int) -> None:
    engine = trained(GradientNoise(eta, gamma=gamma), GradientAccumulation(window))
    assert same(engine.model, plain_loop(eta, gamma, window=window))
    assert not same(engine.model, plain_loop(None, window=window))


@pytest.mark.slow
@pytest.mark.parametrize("window", quick([1, 4], 4))
def test_together_with_clipping_and_fp16_in_every_order(window: int) -> None:
    reference = plain_loop(0.3, window=window, max_norm=0.2, scaled=True)
    for order in itertools.permutations(range(4)):
        handlers = [
            GradientNoise(0.3),
            GradientClipping(max_norm=0.2),
            MixedPrecision("fp16", init_scale=1024.0),
            GradientAccumulation(window),
        ]
        assert same(trained(*(handlers[place] for place in order)).model, reference), order


def test_a_skipped_step_does_not_let_the_noise_fade() -> None:
    engine = build()
    engine.attach(GradientNoise(0.3))
    engine.connect(Events.GRADIENTS_READY(once=3), lambda engine: engine.state.update.skip("for a test"))
    torch.manual_seed(5)
    engine.run(batches(), max_epochs=2)
    assert same(engine.model, plain_loop(0.3, skipped=3))


@pytest.mark.filterwarnings("ignore:W18")
def test_the_noise_has_the_papers_variance() -> None:
    update = Update.from_function(lambda engine, batch: 0 * engine.model.weight.sum(), partial(torch.optim.SGD, lr=0.0))
    engine = Engine(update, model=nn.Linear(100, 100, bias=False), seed=0)
    engine.attach(GradientNoise(0.3))
    seen: list[float] = []

    @engine.on(Events.OPTIMIZER_STEP_STARTED)
    def look(engine: Engine) -> None:
        seen.append(engine.model.weight.grad.var().item())

    engine.run(max_iters=20)
    for step, variance in enumerate(seen):
        # Of 10,000 numbers the standard error of the variance is 1.4 %; this allows five of them.
        assert variance == pytest.approx(0.3 / (1 + step) ** 0.55, rel=0.07)


@pytest.mark.filterwarnings("ignore:W18")
def test_several_updates_and_several_evaluations_in_an_iteration_draw_different_numbers() -> None:
    models = {"a": nn.Linear(50, 1, bias=False), "b": nn.Linear(50, 1, bias=False)}
    noise: dict[str, list[Tensor]] = {"a": [], "b": []}

    def update(name: str) -> Update:
        return Update.from_function(
            lambda engine, batch: 0 * models[name].weight.sum(),
            partial(torch.optim.LBFGS, max_iter=2, tolerance_grad=0.0, tolerance_change=0.0)
            if name == "b"
            else partial(torch.optim.SGD, lr=0.0),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    engine = Engine([update("a"), update("b")], model=models, seed=0)
    engine.attach(GradientNoise(1.0))

    @engine.on(Events.GRADIENTS_READY)
    def look(engine: Engine) -> None:
        name = engine.state.update.name
        gradient = models[name].weight.grad
        assert gradient is not None
        noise[name].append(gradient.clone())

    engine.run(max_iters=2)
    drawn = noise["a"] + noise["b"]
    assert len(noise["a"]) == 2
    assert len(noise["b"]) > 2
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn, 2))


@pytest.mark.filterwarnings("ignore:W84")
def test_one_update_of_two_gets_noise() -> None:
    models = {"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)}

    def update(name: str) -> Update:
        return Update.from_function(
            lambda engine, batch: 0 * models[name].weight.sum(),
            partial(torch.optim.SGD, lr=1.0),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    before = copy.deepcopy(models)
    engine = Engine([update("a"), update("b")], model=models, seed=0)
    engine.attach(GradientNoise(update="b"))
    engine.run(max_iters=1)
    assert same(models["a"], before["a"])
    assert not same(models["b"], before["b"])
    with pytest.raises(KeyError, match="c"):
        engine.attach(GradientNoise(update="c", name="other"))


@pytest.mark.filterwarnings("ignore:.*is repeated, but the changes from its first forward pass")
def test_an_iteration_that_is_made_again_after_an_error_draws_the_same_noise() -> None:
    engine = build()
    engine.attach(GradientNoise(0.3))

    def fail(engine: Engine) -> None:
        raise ArithmeticError

    handle = engine.connect(Events.OPTIMIZER_STEP_STARTED(once=1), fail)
    with pytest.raises(ArithmeticError):
        engine.run(batches(), max_epochs=2)
    handle.detach()
    torch.manual_seed(5)
    engine.run(batches(), max_epochs=2)
    assert same(engine.model, plain_loop(0.3))


def test_switched_off_it_shifts_no_other_number() -> None:
    handler = GradientNoise(0.3)
    engine = build()
    engine.attach(handler)
    handler.enabled = False
    torch.manual_seed(5)
    engine.run(batches(), max_epochs=2)
    assert same(engine.model, plain_loop(None))


def test_sparse_gradients_are_refused() -> None:
    update = Update.from_function(lambda engine, batch: engine.model(batch).sum(), partial(torch.optim.SGD, lr=0.1))
    engine = Engine(update, model=nn.Embedding(5, 3, sparse=True), seed=0)
    engine.attach(GradientNoise())
    with pytest.raises(TypeError, match="'gradient_noise': a gradient of update 'main' is sparse"):
        engine.run([torch.tensor([1, 1])], max_epochs=1)


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler_and_can_be_copied() -> None:
    check_handler(build, lambda: GradientNoise(0.3), batches(3), max_epochs=2)
    used = trained(GradientNoise(0.3)).handlers["gradient_noise"]
    assert same(trained(copy.deepcopy(used)).model, plain_loop(0.3))


def test_two_on_one_update_refuse_each_other() -> None:
    with pytest.raises(ValueError, match="both 'one' and 'two' control gradient noise"):
        build().attach(GradientNoise(name="one"), GradientNoise(name="two"))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"eta": 0}, ValueError, "eta=0"),
        ({"eta": math.nan}, ValueError, "eta=nan"),
        ({"eta": "1"}, TypeError, "eta='1'"),
        ({"gamma": -0.1}, ValueError, "gamma=-0.1"),
        ({"gamma": math.inf}, ValueError, "gamma=inf"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"GradientNoise\({message}\)"):
        GradientNoise(**options)
