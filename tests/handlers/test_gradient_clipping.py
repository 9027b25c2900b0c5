"""GradientClipping against torch's own clipping in plain PyTorch loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Phase, Update
from signalfire.authoring.versions import TORCH
from signalfire.handlers import GradientAccumulation, GradientClipping, MixedPrecision
from tests import kit
from tests.kit import assert_same, average_gradients, mlp, windows

Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.Tanh())


batches = partial(kit.batches, scale=5.0)


def trained(model: nn.Module, *handlers: Any, epochs: int = 2, data: Batches | None = None) -> Engine:
    engine = kit.build(model, *handlers, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    engine.run(data or batches(), max_epochs=epochs)
    return engine


def plain_loop(options: dict[str, Any], *, window: int = 1, epochs: int = 2) -> tuple[nn.Sequential, list[float]]:
    """The trained model, and the norms before each clip."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data, norms = batches(), []
    for _ in range(epochs):
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                nn.functional.mse_loss(model(inputs), targets).backward()
            average_gradients(model, len(chunk))
            if "max_value" in options:
                nn.utils.clip_grad_value_(model.parameters(), options["max_value"])
            if "max_norm" in options:
                norm = nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"], options.get("norm_type", 2.0))
                norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
    return model, norms


OPTIONS: list[dict[str, Any]] = [
    {"max_norm": 0.5},
    {"max_norm": 0.5, "norm_type": math.inf},
    {"max_norm": 0.5, "norm_type": 1.0},
    {"max_value": 0.05},
    {"max_norm": 0.3, "max_value": 0.2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_equal_a_plain_loop(options: dict[str, Any]) -> None:
    model = network()
    trained(model, GradientClipping(**options))
    reference, _ = plain_loop(options)
    unclipped, _ = plain_loop({})
    assert_same(model, reference)
    assert not torch.equal(
        next(model.parameters()), next(unclipped.parameters())
    )  # the limit was reached: the test can fail


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("accumulation_first", [True, False])
def test_with_accumulation_it_clips_once_for_each_window(options: dict[str, Any], accumulation_first: bool) -> None:
    model = network()
    handlers = [GradientAccumulation(4), GradientClipping(**options)]
    trained(model, *(handlers if accumulation_first else reversed(handlers)))
    assert_same(model, plain_loop(options, window=4)[0])


def test_the_total_norm_is_that_before_the_clip() -> None:
    model = network()
    handler = GradientClipping(max_norm=0.5)
    assert handler.total_norm is None
    trained(model, handler)
    _, norms = plain_loop({"max_norm": 0.5})
    assert handler.total_norm is not None
    assert handler.total_norm.item() == norms[-1]
    assert norms[-1] > 0.5


class Named(Tensor):
    """A tensor of a class of its own."""


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def with_a_graph(*shape: int) -> Tensor:
    return values(*shape).requires_grad_() + 1


GRADIENTS: dict[str, Callable[[], list[Tensor | None]]] = {
    **{str(dtype): partial(lambda dtype: [values(3, 2, dtype=dtype), None, values(5, dtype=dtype)], dtype)
       for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)},
    "two dtypes": lambda: [values(3), values(5, dtype=torch.float64), values(2, 2), values(4, dtype=torch.float64)],
    "a graph": lambda: [with_a_graph(3, 2), values(5)],
    "strides": lambda: [values(4, 3).t(), values(9)[::2]],
    "a subclass": lambda: [values(3, 2).as_subclass(Named), values(5)],
    "none": lambda: [None, None],
    "infinite": lambda: [values(3, 2) / 0, values(5)],
    "zero": lambda: [torch.zeros(3, 2), torch.zeros(5)],
    "small": lambda: [values(3, 2) / 1000, values(5) / 1000],
    "many": lambda: [values(2, n) for n in range(1, 200)],
}  # fmt: skip


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), type(tensor.grad_fn)


@pytest.mark.filterwarnings("ignore:C32")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_any_kind_are_clipped_as_torch_does(kind: str, norm_type: float) -> None:
    make = GRADIENTS[kind]
    model = nn.ParameterList(
        nn.Parameter(torch.zeros(2) if gradient is None else torch.zeros_like(gradient, requires_grad=False))
        for gradient in make()
    )
    clipping = GradientClipping(max_norm=0.5, norm_type=norm_type)

    def set_gradients() -> None:
        for parameter, gradient in zip(model, make(), strict=True):
            parameter.grad = gradient

    def seen(norm: Tensor | None) -> list[Tensor | None]:
        return [norm, *(parameter.grad for parameter in model)]

    update = Update.from_function(
        lambda engine, batch: torch.stack([p.abs().double().sum() for p in model]).sum(),
        partial(torch.optim.SGD, lr=0.1),
    )
    engine = Engine(update, model=model)
    engine.attach(clipping)
    engine.connect(Events.GRADIENTS_READY, lambda engine: set_gradients(), phase=Phase.PREPARE)
    own: list[Tensor | None] = []
    engine.connect(Events.OPTIMIZER_STEP_STARTED, lambda engine: own.extend(seen(clipping.total_norm)))
    engine.connect(Events.OPTIMIZER_STEP_STARTED, lambda engine: engine.state.update.skip("seen"))
    engine.run([1], max_epochs=1)

    set_gradients()
    plain = seen(nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type))
    assert len(own) == len(plain) > 1
    for one, other in zip(own, plain, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert _kind(one) == _kind(other)
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_sparse_gradients_are_clipped_as_torch_does_and_refused_before_it_did() -> None:
    torch.manual_seed(0)
    model, plain = (nn.Embedding(5, 2, sparse=True) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    update = Update.from_function(lambda engine, batch: model(batch).sum(), partial(torch.optim.SGD, lr=0.1))
    engine = Engine(update, model=model)
    engine.attach(GradientClipping(max_norm=0.5))
    refused = nullcontext() if TORCH >= (2, 14) else pytest.raises(NotImplementedError, match="Sparse")
    with refused:
        engine.run([torch.tensor([1, 2])], max_epochs=1)
    plain(torch.tensor([1, 2])).sum().backward()
    with refused:
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(model, plain)


@pytest.mark.parametrize(
    "options", [{"max_value": 1e6}, {"max_norm": 1e6}, {"max_norm": 10**20}, {"max_norm": math.inf}]
)
def test_gradients_within_the_limits_stay_as_they_are(options: dict[str, Any]) -> None:
    model = network()
    trained(model, GradientClipping(**options))
    assert_same(model, plain_loop({})[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("clipping_first", [True, False])
@pytest.mark.parametrize("window", [1, 4])
def test_under_fp16_scaling_unscaled_gradients_are_clipped(
    options: dict[str, Any], clipping_first: bool, window: int
) -> None:
    model = network()
    handlers: list[Any] = [GradientClipping(**options), MixedPrecision("fp16", init_scale=1024.0)]
    engine = trained(
        model, *(handlers if clipping_first else reversed(handlers)), GradientAccumulation(window), epochs=1
    )

    reference = network()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = batches()
    for chunk in windows(data, window):
        for inputs, targets in chunk:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(reference(inputs), targets)
            scaler.scale(loss).backward()
        average_gradients(reference, len(chunk))
        scaler.unscale_(optimizer)
        if "max_value" in options:
            nn.utils.clip_grad_value_(reference.parameters(), options["max_value"])
        if "max_norm" in options:
            nn.utils.clip_grad_norm_(reference.parameters(), options["max_norm"], options.get("norm_type", 2.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_same(model, reference)
    assert engine.updates[0].steps == -(-6 // window)


def test_one_update_of_two_is_clipped() -> None:
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

    models = {"a": Weight(), "b": Weight()}

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Any) -> Tensor:
            product: Tensor = models[name].weight * batch
            return product

        return Update.from_function(
            function,
            partial(torch.optim.SGD, lr=1.0),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    engine = Engine([update("a"), update("b")], model=models, seed=0)
    engine.attach(GradientClipping(max_value=1.0, update="b"))
    engine.run([torch.tensor(3.0), torch.tensor(-0.5)], max_epochs=1)
    assert (models["a"].weight.item(), models["b"].weight.item()) == (-2.5, -0.5)
    with pytest.raises(KeyError, match="c"):
        engine.attach(GradientClipping(max_value=1.0, update="c", name="other"))


def test_a_user_sees_clipped_gradients_before_the_step() -> None:
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
    engine = Engine(update, model=network(), seed=0)
    engine.attach(GradientClipping(max_value=0.01))
    largest: list[float] = []

    @engine.on(Events.OPTIMIZER_STEP_STARTED)
    def note(engine: Engine) -> None:
        largest.append(max(p.grad.abs().max().item() for p in engine.model.parameters()))

    engine.run(batches(), max_epochs=1)
    assert len(largest) == 6
    assert max(largest) <= 0.01 + 1e-9


@pytest.mark.parametrize("way", ["without", "disabled", "detached"])
def test_switched_off_it_equals_a_plain_loop(way: str) -> None:
    model = network()
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    engine = Engine(update, model=model, seed=0)
    handler = GradientClipping(max_norm=0.5)
    engine.attach(handler)
    if way == "without":
        with engine.without("gradient_clipping"):
            engine.run(batches(), max_epochs=2)
    else:
        if way == "disabled":
            handler.enabled = False
        else:
            engine.detach(handler)
        engine.run(batches(), max_epochs=2)
        assert not engine.signal(Events.GRADIENTS_READY).receivers
    assert_same(model, plain_loop({})[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_norm": 0},
        {"max_norm": -1.0},
        {"max_norm": math.nan},
        {"max_norm": "1"},
        {"max_value": 0.0},
        {"max_value": math.nan},
        {"max_norm": 1.0, "norm_type": 0},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options: dict[str, Any]) -> None:
    kind = TypeError if "1" in options.values() else ValueError
    with pytest.raises(kind, match="GradientClipping"):
        GradientClipping(**options)
