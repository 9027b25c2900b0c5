"""GradientNorms against what torch's own clipping returns in plain PyTorch loops."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update
from signalfire.handlers import GradientAccumulation, GradientClipping, GradientNorms, History, MixedPrecision
from signalfire.testing import check_handler
from tests import kit
from tests.kit import average_gradients, mlp, quick, windows

Batches = list[tuple[Tensor, Tensor]]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.Tanh())


batches = partial(kit.batches, scale=5.0)


def build(model: nn.Module | None = None) -> Engine:
    return kit.build(model or network(), optimizer=SGD)


def written(engine: Engine, *handlers: Any, epochs: int = 2, count: int = 6) -> list[tuple[int, dict[str, float]]]:
    """The iteration and the metrics at which something new was written."""
    engine.attach(*handlers)
    seen = kit.new_metrics(engine)
    engine.run(batches(count), max_epochs=epochs)
    return seen


def plain_loop_norms(
    norm_type: float, *, window: int = 1, scaled: bool = False, max_norm: float = math.inf, epochs: int = 2
) -> list[dict[str, float]]:
    model = network()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    data, norms = batches(), []
    for _ in range(epochs):
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            scaler.unscale_(optimizer)
            found = {}
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                found[f"gradient_norm/{name}"] = torch.linalg.vector_norm(parameter.grad, norm_type).item()
            found["gradient_norm"] = nn.utils.clip_grad_norm_(model.parameters(), math.inf, norm_type).item()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            norms.append(found)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("norm_type", [2.0, 1, 3.0, math.inf])
def test_the_norms_equal_what_clip_grad_norm_returns(norm_type: float) -> None:
    found = written(build(), GradientNorms(norm_type=norm_type, per_parameter=True))
    assert [metrics for _, metrics in found] == plain_loop_norms(norm_type)
    assert set(found[0][1]) == {
        "gradient_norm",
        *(f"gradient_norm/{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")),
    }


def test_only_the_total_is_written_unless_more_is_asked_for_and_it_stays_a_tensor() -> None:
    engine = build()
    found = written(engine, GradientNorms())
    assert [metrics for _, metrics in found] == [
        {"gradient_norm": one["gradient_norm"]} for one in plain_loop_norms(2.0)
    ]
    assert isinstance(engine.state.metrics["gradient_norm"], Tensor)
    assert engine.state.metrics.owners["gradient_norm"] == "gradient_norms"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_under_fp16_accumulation_and_clipping_it_is_the_unscaled_norm_before_the_clip(order: tuple[int, ...]) -> None:
    handlers = [
        GradientNorms(per_parameter=True),
        GradientClipping(max_norm=0.5),
        MixedPrecision("fp16", init_scale=1024.0),
        GradientAccumulation(4),
    ]
    found = written(build(), *(handlers[place] for place in order))
    assert [iteration for iteration, _ in found] == [4, 6, 10, 12]
    assert [metrics for _, metrics in found] == plain_loop_norms(2.0, window=4, scaled=True, max_norm=0.5)
    assert all(metrics["gradient_norm"] > 0.5 for _, metrics in found)


@pytest.mark.parametrize(
    ("every", "iterations"),
    [
        ("1st", [4, 6, 10, 12, 16, 18]),
        ("2st", [6, 12, 18]),
        ("4st", [12]),
        ("3it", [4, 6, 10, 12, 16, 18]),
        ("6it", [6, 12, 18]),
        ("7it", [10, 16]),
        (Events.GRADIENTS_READY(every=3), [6, 12, 18]),  # in iterations: not in those that make no step
        (Events.GRADIENTS_READY(after=10), [12, 16, 18]),
    ],
    ids=str,
)
def test_the_interval_counts_steps(every: Any, iterations: list[int]) -> None:
    found = written(build(), GradientNorms(every=every), GradientAccumulation(4), epochs=3)
    assert [iteration for iteration, _ in found] == iterations


def test_a_skipped_step_is_no_step_and_the_next_is_measured_in_its_place() -> None:
    engine = build()
    engine.connect(Events.GRADIENTS_READY(once=2), lambda engine: engine.state.update.skip("for a test"))
    found = written(engine, GradientNorms(every="2st"), epochs=1)
    assert [iteration for iteration, _ in found] == [2, 3, 5]


def test_histories_take_the_tensors_as_numbers() -> None:
    history = History()
    found = written(build(), GradientNorms(), history)
    assert history["gradient_norm"] == [values["gradient_norm"] for _, values in found]
    assert [iteration for _, iteration, _ in history.records["gradient_norm"]] == [iteration for iteration, _ in found]


def two_updates() -> Engine:
    models = {"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)}

    def update(name: str) -> Update:
        return Update.from_function(
            lambda engine, batch: models[name](batch).sum(),
            partial(torch.optim.SGD, lr=1.0),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    return Engine([update("a"), update("b")], model=models, seed=0)


def test_several_updates_have_metrics_of_their_own() -> None:
    data = [torch.tensor([[3.0, 4.0]])]
    engine = two_updates()
    engine.attach(GradientNorms(per_parameter=True))
    engine.run(data, max_epochs=1)
    assert {name: value.item() for name, value in engine.state.metrics.items()} == {
        "gradient_norm/a": 5.0,
        "gradient_norm/a/a.weight": 5.0,
        "gradient_norm/b": 5.0,
        "gradient_norm/b/b.weight": 5.0,
    }
    engine = two_updates()
    engine.attach(GradientNorms(update="b"))
    engine.run(data, max_epochs=1)
    assert set(engine.state.metrics) == {"gradient_norm/b"}
    with pytest.raises(KeyError, match="c"):
        engine.attach(GradientNorms(update="c", name="other"))


def test_two_that_write_the_same_metric_refuse_each_other_before_the_first_batch() -> None:
    engine = build()
    engine.attach(GradientNorms(), GradientNorms(name="other", norm_type=math.inf))
    with pytest.raises(ValueError, match="both 'gradient_norms' and 'other' write the metric 'gradient_norm'"):
        engine.run(batches(), max_epochs=1)
    assert engine.state.iteration == 0


class Scaled(nn.Module):
    """A model with a parameter of its own, beside layers of different depth and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.Sequential(mlp(5, 8, 8, nn.Tanh()), nn.LayerNorm(8))
        self.model, self.idle = nn.Linear(8, 1), nn.Linear(1, 1)  # "model" is no other name of the whole

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.scale * self.model(self.blocks(inputs))
        return output


@pytest.mark.parametrize("per_parameter", [False, True])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_the_norm_of_a_layer_is_what_clip_grad_norm_returns_for_its_parameters(
    norm_type: float, window: int, per_parameter: bool
) -> None:
    model, expected = Scaled(), list[dict[str, float]]()
    layers = {name or "(model)": part for name, part in model.named_modules() if [*part.parameters(recurse=False)]}
    assert list(layers) == ["(model)", "blocks.0.0", "blocks.0.2", "blocks.1", "model", "idle"]
    optimizer = SGD(model.parameters())
    for chunk in windows(batches(), window):
        for inputs, targets in chunk:
            nn.functional.mse_loss(model(inputs), targets).backward()
        for gradient in _gradients(model):
            gradient.div_(len(chunk))
        norms = {
            f"gradient_norm/{name}": nn.utils.clip_grad_norm_(part.parameters(recurse=False), math.inf, norm_type)
            for name, part in layers.items()
            if name != "idle"
        }
        expected.append({name: norm.item() for name, norm in norms.items()})
        optimizer.step()
        optimizer.zero_grad()
    handler = GradientNorms(norm_type=norm_type, per_layer=True, per_parameter=per_parameter)
    engine = build(Scaled())
    found = written(engine, handler, GradientAccumulation(window), epochs=1)
    assert [{name: metrics[name] for name in expected[0]} for _, metrics in found] == expected
    assert len(found[0][1]) == 1 + 5 + (9 if per_parameter else 0)
    assert {"gradient_norm/idle", "gradient_norm/(model)"} <= set(engine.state.metrics.owners)  # announced


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_sparse_gradients_and_parameters_without_a_gradient(norm_type: float) -> None:
    model: Any = nn.ModuleDict({"table": nn.Embedding(5, 2, sparse=True), "empty": Empty(), "idle": nn.Linear(1, 1)})
    update = Update.from_function(
        lambda engine, batch: model["table"](batch).sum() + model["empty"].weight.sum(),
        partial(torch.optim.SGD, lr=0.1),
    )
    engine = Engine(update, model=model, seed=0)
    engine.attach(GradientNorms(norm_type=norm_type, per_parameter=True))
    engine.run([torch.tensor([1, 1, 2])], max_epochs=1)  # gradients of 2, 2, 1, 1
    expected = math.sqrt(10) if norm_type == 2.0 else 2.0
    metrics = engine.state.metrics
    assert metrics["gradient_norm/table.weight"].item() == pytest.approx(expected)
    assert metrics["gradient_norm"].item() == pytest.approx(expected)
    assert "gradient_norm/idle.weight" not in metrics


def test_closures_are_measured_at_their_first_evaluation() -> None:
    model = network()
    engine = Engine(
        Update.supervised(nn.functional.mse_loss, partial(torch.optim.LBFGS, max_iter=3)), model=model, seed=0
    )
    engine.attach(GradientNorms())
    engine.run(batches(1), max_epochs=1)
    reference = network()
    inputs, targets = batches(1)[0]
    nn.functional.mse_loss(reference(inputs), targets).backward()
    assert engine.state.metrics.serials == {"gradient_norm": 1}
    assert torch.equal(engine.state.metrics["gradient_norm"], nn.utils.get_total_norm(_gradients(reference)))


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.moderate
@pytest.mark.parametrize("every", quick(["1st", "2st", "2it"], "2it"))
def test_it_keeps_the_promises_of_a_handler(every: str) -> None:
    def make() -> Engine:
        engine = build()
        engine.attach(GradientAccumulation(2))
        return engine

    check_handler(
        make,
        lambda: GradientNorms(every=every, per_parameter=True, per_layer=True),
        batches(5),
        max_epochs=2,
        changes_training=False,
    )


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"norm_type": 0}, ValueError, "norm_type=0"),
        ({"per_layer": 1}, TypeError, "per_layer=1"),
        ({"norm_type": math.nan}, ValueError, "norm_type=nan"),
        ({"norm_type": "2"}, TypeError, "norm_type='2'"),
        ({"every": "1ep"}, ValueError, "every='1ep'"),
        ({"every": "5min"}, ValueError, "every='5min'"),
        ({"every": 3}, TypeError, "every=3"),
        ({"every": Events.ITERATION_COMPLETED(every=2)}, ValueError, "every=Events.ITERATION_COMPLETED"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"GradientNorms\({message}"):
        GradientNorms(**options)
