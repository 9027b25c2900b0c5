"""AdaptiveGradientClipping against the paper's rule in plain PyTorch loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update
from signalfire.handlers import AdaptiveGradientClipping, GradientAccumulation, GradientClipping, MixedPrecision
from signalfire.testing import check_handler
from tests import kit
from tests.kit import average_gradients, quick, same, windows

Batches = list[tuple[Tensor, Tensor]]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Tanh(), Scale(), nn.Linear(16, 2))


def batches(count: int = 6) -> Batches:
    return kit.batches(count, (2, 4, 4), 2, scale=5.0)


def trained(model: nn.Module, *handlers: Any, epochs: int = 2) -> Engine:
    engine = kit.build(model, *handlers, optimizer=SGD)
    engine.run(batches(), max_epochs=epochs)
    return engine


def unit_norm(x: Tensor) -> Tensor:
    rows = x.dim() > 1
    norm: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())) if rows else None, keepdim=rows)
    return norm


def plain_clip(model: nn.Module, clipping: float, eps: float, excluded: tuple[str, ...] = ()) -> None:
    """The paper's equation 3."""
    for name, parameter in model.named_parameters():
        if name in excluded:
            continue
        assert parameter.grad is not None
        largest = clipping * unit_norm(parameter.detach()).clamp(min=eps)
        norm = unit_norm(parameter.grad)
        parameter.grad.copy_(torch.where(norm > largest, parameter.grad * (largest / norm), parameter.grad))


def plain_loop(
    change: Callable[[nn.Module], object], *, window: int = 1, epochs: int = 2, scaled: bool = False
) -> nn.Sequential:
    model = network()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    data = batches()
    for _ in range(epochs):
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            scaler.unscale_(optimizer)
            change(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize(("clipping", "eps"), [(0.02, 1e-3), (0.2, 1e-3), (0.02, 0.5)])
@pytest.mark.parametrize("window", [1, 4])
def test_weights_equal_a_plain_loop(clipping: float, eps: float, window: int) -> None:
    model = network()
    trained(model, AdaptiveGradientClipping(clipping, eps=eps), GradientAccumulation(window))
    assert same(model, plain_loop(lambda m: plain_clip(m, clipping, eps), window=window))
    assert not same(model, plain_loop(lambda m: None, window=window))


def test_each_unit_is_bounded_by_its_own_weights() -> None:
    model: Any = network()
    with torch.no_grad():
        model[4].weight[1] *= 10
    engine = Engine(Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=1.0)), model=model, seed=0)
    engine.attach(AdaptiveGradientClipping(0.01, eps=1e-3))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.run(batches(1), max_epochs=1)
    for name, parameter in model.named_parameters():
        step, was = before[name] - parameter.detach(), before[name]
        units = zip(step, was, strict=True) if was.dim() > 1 else [(step, was)]
        for moved, weights in units:
            # With a rate of one the step is the gradient. It is a difference of weights a hundred times as large.
            assert moved.norm().item() == pytest.approx(0.01 * max(weights.norm().item(), 1e-3), rel=1e-4), name


@pytest.mark.filterwarnings("ignore:W84")
def test_small_gradients_and_zero_gradients_stay_as_they_are() -> None:
    model = network()
    trained(model, AdaptiveGradientClipping(1e6))
    assert same(model, plain_loop(lambda m: None))
    engine = Engine(
        Update.from_function(lambda engine, batch: 0 * sum(p.sum() for p in engine.model.parameters()), SGD),
        model=network(),
        seed=0,
    )
    engine.attach(AdaptiveGradientClipping())
    engine.run(max_iters=2)
    assert same(engine.model, network())


@pytest.mark.parametrize(
    "exclude",
    ["4", "4.*", ["4.weight", "*4.bias"], lambda name, parameter: name.startswith("4")],
    ids=["a name", "a pattern", "patterns", "a function"],
)
def test_what_is_excluded_is_left_alone(exclude: Any) -> None:
    model = network()
    trained(model, AdaptiveGradientClipping(0.02, exclude=exclude))
    assert same(model, plain_loop(lambda m: plain_clip(m, 0.02, 1e-3, ("4.weight", "4.bias"))))


def test_a_shared_weight_is_excluded_by_either_of_its_names() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(*network(), nn.Linear(2, 2), nn.Tanh())
        model.add_module("shared", nn.Linear(2, 2))
        model.get_submodule("shared").weight = model.get_submodule("5").weight
        return model

    models = tied(), tied()
    for model, exclude in zip(models, ("5.weight", "shared.weight"), strict=True):
        trained(model, AdaptiveGradientClipping(0.02, exclude=exclude))
    assert same(*models)


def test_a_pattern_without_a_match_is_an_error_before_the_first_batch() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"'adaptive_gradient_clipping': exclude='head\.\*' matches no.*0\.weight"):
        trained(model, AdaptiveGradientClipping(exclude="head.*"))
    assert same(model, network())


@pytest.mark.slow
@pytest.mark.parametrize("window", quick([1, 4], 4))
def test_together_with_clipping_by_norm_and_fp16_in_every_order(window: int) -> None:
    def change(model: nn.Module) -> None:
        plain_clip(model, 0.05, 1e-3)
        nn.utils.clip_grad_norm_(model.parameters(), 0.03)

    reference = plain_loop(change, window=window, scaled=True)

    def other_way_round(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.03)
        plain_clip(model, 0.05, 1e-3)

    assert not same(reference, plain_loop(other_way_round, window=window, scaled=True))
    for order in itertools.permutations(range(4)):
        handlers = [
            AdaptiveGradientClipping(0.05),
            GradientClipping(max_norm=0.03),
            MixedPrecision("fp16", init_scale=1024.0),
            GradientAccumulation(window),
        ]
        model = network()
        trained(model, *(handlers[place] for place in order))
        assert same(model, reference), order


def test_one_update_of_two_is_clipped_and_several_modules_are_named() -> None:
    models = {"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1)}
    for module in models.values():
        nn.init.ones_(module.weight)
    nn.init.zeros_(models["b"].bias)

    def update(name: str) -> Update:
        return Update.from_function(
            lambda engine, batch: models[name](batch).sum(),
            partial(torch.optim.SGD, lr=1.0),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    engine = Engine([update("a"), update("b")], model=models, seed=0)
    engine.attach(AdaptiveGradientClipping(0.5, update="b", exclude="b.bias"))
    engine.run([torch.tensor([[3.0, 4.0]])], max_epochs=1)
    assert torch.equal(models["a"].weight, torch.tensor([[-2.0, -3.0]]))
    ratio = 0.5 * math.sqrt(2) / 5
    torch.testing.assert_close(models["b"].weight.detach(), torch.tensor([[1 - 3 * ratio, 1 - 4 * ratio]]))
    assert models["b"].bias.item() == -1.0
    with pytest.raises(KeyError, match="c"):
        engine.attach(AdaptiveGradientClipping(update="c", name="other"))


def test_parameters_that_join_the_optimizer_are_clipped_too() -> None:
    model: Any = network()
    engine = Engine(
        Update.supervised(nn.functional.mse_loss, SGD, parameters=lambda engine: model[4].parameters()), model=model
    )
    engine.attach(AdaptiveGradientClipping(0.02))
    before = model[0].weight.detach().clone()

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def unfreeze(engine: Engine) -> None:
        assert torch.equal(model[0].weight, before)
        optimizer = engine.updates[0].optimizer
        assert optimizer is not None
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1.0})
        model[0].zero_grad()

    engine.run(batches(3), max_epochs=1)
    moved = unit_norm(model[0].weight.detach() - before)
    assert bool((moved <= 0.02 * unit_norm(before) * 1.001).all())
    assert bool((moved > 0).all())


def test_sparse_gradients_are_refused_unless_excluded() -> None:
    def engine(**options: Any) -> Engine:
        model = nn.Embedding(5, 3, sparse=True)
        update = Update.from_function(lambda engine, batch: engine.model(batch).sum(), partial(torch.optim.SGD, lr=0.1))
        made = Engine(update, model=model, seed=0)
        made.attach(AdaptiveGradientClipping(**options))
        return made

    with pytest.raises(TypeError, match="'adaptive_gradient_clipping': a gradient of update 'main' is sparse"):
        engine().run([torch.tensor([1, 1])], max_epochs=1)
    engine(exclude="weight").run([torch.tensor([1, 1])], max_epochs=1)


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler() -> None:
    def build() -> Engine:
        return Engine(Update.supervised(nn.functional.mse_loss, SGD), model=network(), seed=0)

    check_handler(build, lambda: AdaptiveGradientClipping(0.05, exclude="4.*"), batches(3), max_epochs=2)


def test_two_on_one_update_refuse_each_other() -> None:
    with pytest.raises(ValueError, match="both 'one' and 'two' control adaptive gradient clipping"):
        trained(network(), AdaptiveGradientClipping(name="one"), AdaptiveGradientClipping(name="two"))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"clipping": 0}, ValueError, "clipping=0"),
        ({"clipping": math.nan}, ValueError, "clipping=nan"),
        ({"clipping": "1"}, TypeError, "clipping='1'"),
        ({"eps": -1.0}, ValueError, "eps=-1.0"),
        ({"eps": True}, TypeError, "eps=True"),
        ({"exclude": [3]}, TypeError, r"exclude=\[3\]"),
        ({"exclude": 3}, TypeError, "exclude=3"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"AdaptiveGradientClipping\({message}\)"):
        AdaptiveGradientClipping(**options)
