"""Lookahead against plain loops that keep the slow weights themselves."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from signalfire import Engine, Events, FindingWarning, Update, seed_everything
from signalfire.distributed import whole_tensor
from signalfire.handlers import (
    EMA,
    FullyShardedDataParallel,
    GradientAccumulation,
    Lookahead,
    MixedPrecision,
    Pruning,
    TruePrecision,
    Validation,
)
from signalfire.testing import check_handler
from tests import kit
from tests.kit import assert_same, average_gradients, batches, digest, evaluator_of, mlp, quick, same, windows
from tests.processes import run_together

ADAM = partial(torch.optim.AdamW, lr=0.05)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Dropout(0.2))


def build(*handlers: Any, optimizer: Any = ADAM, model: nn.Module | None = None) -> Engine:
    return kit.build(model or network(), *handlers, optimizer=optimizer)


def run(engine: Engine, **bounds: Any) -> Engine:
    seed_everything(1)
    engine.run(batches(), **({"max_epochs": 3} | bounds))
    return engine


class Plain:
    """A plain loop: the model, its slow weights, the average of its weights and the optimizer."""

    def __init__(
        self, k: int, alpha: float, *, window: int = 1, optimizer: Any = ADAM, scale: float | None = None
    ) -> None:
        self.model = network()
        self.optimizer = optimizer(self.model.parameters())
        self.slow = [p.detach().clone() for p in self.model.parameters()]
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.skipped = 0
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=3, enabled=scale is not None)
        seed_everything(1)
        made = 0
        for _ in range(3):
            for chunk in windows(batches(), window):
                for inputs, targets in chunk:
                    with torch.autocast("cpu", dtype=torch.float16, enabled=scale is not None):
                        loss = nn.functional.mse_loss(self.model(inputs), targets)
                    scaler.scale(loss).backward()
                scaler.unscale_(self.optimizer)
                average_gradients(self.model, len(chunk))
                before = scaler.get_scale()
                scaler.step(self.optimizer)
                scaler.update()
                self.optimizer.zero_grad()
                if scaler.get_scale() < before:
                    self.skipped += 1
                    continue
                made += 1
                if made % k == 0:
                    self.synchronize(alpha)
                self.average.update_parameters(self.model)

    @torch.no_grad()
    def synchronize(self, alpha: float) -> None:
        for slow, parameter in zip(self.slow, self.model.parameters(), strict=True):
            slow.lerp_(parameter, alpha)
            parameter.copy_(slow)


@pytest.mark.moderate
@pytest.mark.parametrize(("k", "alpha"), [(5, 0.5), (3, 0.8), (1, 0.25), (2, 1.0)])
@pytest.mark.parametrize("window", [1, 4])
def test_weights_and_the_optimizers_state_equal_a_plain_loop(k: int, alpha: float, window: int) -> None:
    engine = run(build(Lookahead(k, alpha), GradientAccumulation(window)))
    plain = Plain(k, alpha, window=window)
    assert_same(engine.model, plain.model)
    optimizer = engine.updates[0].optimizer
    assert optimizer is not None
    assert digest(optimizer.state_dict()) == digest(plain.optimizer.state_dict())
    assert same(engine.model, run(build(GradientAccumulation(window))).model) == (alpha == 1.0)


@pytest.mark.moderate
def test_steps_that_a_scaler_skips_do_not_count_and_an_average_takes_the_synchronised_weights() -> None:
    plain = Plain(3, 0.5, optimizer=SGD, scale=2.0**17)
    assert plain.skipped > 1
    for order in itertools.permutations(range(3)):
        several = [
            Lookahead(3, 0.5),
            EMA(0.8),
            MixedPrecision("fp16", init_scale=2.0**17, growth_interval=3),
        ]
        engine = run(build(*(several[place] for place in order), optimizer=SGD))
        assert_same(engine.model, plain.model)
        average = plain.average.module.state_dict()
        assert all(torch.equal(value, average[name]) for name, value in engine.weights()["model"].items())


@pytest.mark.moderate
@pytest.mark.parametrize("evaluate", [False, True])
def test_an_evaluation_sees_the_weights_of_the_optimizer_or_on_request_the_slow_ones(evaluate: bool) -> None:
    model = network()
    handler = Lookahead(5, 0.5, evaluate=evaluate)
    engine = build(handler, model=model)
    engine.attach(Validation(evaluator_of(model), batches(2), every="2it"))
    seen: list[list[Tensor]] = []
    slow: list[list[Tensor]] = []
    weights: list[list[Tensor]] = []

    def take(into: list[list[Tensor]]) -> None:
        into.append([p.detach().clone() for p in model.parameters()])

    evaluator = engine.find(Validation).evaluator
    evaluator.connect(Events.STARTED, lambda engine: take(seen))

    @engine.on(Events.UPDATE_COMPLETED)
    def look(engine: Engine) -> None:
        if engine.state.iteration % 2 == 0:
            take(weights)
            with handler.in_place():
                take(slow)

    run(engine)
    expected = slow if evaluate else weights
    assert len(seen) == 9
    assert digest(seen) == digest(expected)
    assert digest(slow) != digest(weights)
    plain = Plain(5, 0.5)
    assert_same(model, plain.model)
    exported = list(engine.weights()["model"].values())
    kept = plain.slow if evaluate else list(plain.model.parameters())
    assert torch.equal(exported[0], kept[0])
    assert torch.equal(exported[1], kept[1])


def test_a_saved_state_exports_its_slow_weights_before_the_run_that_continues() -> None:
    whole = run(build(Lookahead(4, 0.5, evaluate=True)), max_iters=6)
    again = build(Lookahead(4, 0.5, evaluate=True))
    again.load_state_dict(whole.state_dict())
    assert_same(again.weights()["model"], whole.weights()["model"])
    assert not same(again.weights()["model"], whole.model.state_dict())
    assert_same(again.model, whole.model)


def test_it_begins_with_the_weights_that_are_there_when_it_joins() -> None:
    """After 4 steps it is attached; then 2 steps are missed; then other weights are loaded."""
    handler, model = Lookahead(3, 0.5), network()
    engine = build(optimizer=SGD, model=model)
    other = {"model": {name: value + 1 for name, value in network().state_dict().items()}}

    @engine.on(Events.ITERATION_COMPLETED)
    def change(engine: Engine) -> None:
        if engine.state.iteration == 4:
            engine.attach(handler)
        if engine.state.iteration in (9, 11):
            handler.enabled = engine.state.iteration == 11
        if engine.state.iteration == 15:
            engine.load_weights(other)

    run(engine)
    plain = network()
    optimizer = SGD(plain.parameters())
    seed_everything(1)
    slow: list[Tensor] = []
    for iteration, (inputs, targets) in enumerate(batches() * 3, 1):
        nn.functional.mse_loss(plain(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if iteration == 15:
            plain.load_state_dict(other["model"])
        if iteration in (4, 11, 15):
            slow = [p.detach().clone() for p in plain.parameters()]
        elif iteration in (7, 14, 18):
            with torch.no_grad():
                for one, parameter in zip(slow, plain.parameters(), strict=True):
                    one.lerp_(parameter, 0.5)
                    parameter.copy_(one)
    assert_same(model, plain)


@pytest.mark.parametrize("iterations", [0, 4])
def test_a_state_without_it_is_continued_from_the_loaded_weights(iterations: int) -> None:
    first = build(optimizer=SGD)
    if iterations:
        run(first, max_iters=iterations)
    with torch.no_grad():
        first.model[0].bias.add_(1)
    engine = build(Lookahead(2, 0.5), optimizer=SGD)
    engine.load_state_dict(first.state_dict(), allow=["lookahead"])
    starts: list[Tensor] = []

    @engine.on(Events.ITERATION_STARTED(once=iterations + 1))
    def look(engine: Engine) -> None:
        starts.append(engine.find(Lookahead).parameter_copies()["model.0.bias"].clone())

    run(engine, max_iters=iterations + 2)
    assert torch.equal(starts[0], first.model[0].bias)


def test_a_state_that_was_loaded_while_it_was_disabled_has_missed_the_steps_until_it_joins() -> None:
    first = run(build(Lookahead(3)), max_iters=4)
    engine = build(handler := Lookahead(3))
    handler.enabled = False
    engine.load_state_dict(first.state_dict())
    found: list[bool] = []

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine: Engine) -> None:
        handler.enabled = engine.state.iteration >= 9
        if engine.state.iteration == 10:
            found.append(torch.equal(handler.parameter_copies()["model.0.weight"], engine.model[0].weight))

    run(engine)
    assert found == [True]


def test_one_update_of_two_and_parameters_outside_of_all_modules() -> None:
    models = {"a": nn.Linear(5, 1), "b": nn.Linear(5, 1)}
    free = nn.Parameter(torch.ones(1))

    def update(name: str, *more: nn.Parameter) -> Update:
        return Update.from_function(
            lambda engine, batch: nn.functional.mse_loss(models[name](batch[0]) * free, batch[1]),
            partial(torch.optim.SGD, lr=0.1),
            name=name,
            parameters=lambda engine: [*models[name].parameters(), *more],
        )

    engine = Engine([update("a"), update("b", free)], model=models, seed=0)
    engine.attach(handler := Lookahead(100, update="b"))
    engine.run(batches(), max_epochs=1, check=False)
    assert set(handler.state_dict()) == {"b"}
    assert set(handler.state_dict()["b"]["weights"]) == {"b.weight", "b.bias", "parameter 2"}
    assert handler.state_dict()["b"]["weights"]["parameter 2"] == 1
    assert set(handler.parameter_copies()) == {"b.weight", "b.bias", "parameter 2"}
    with pytest.raises(KeyError, match="c"):
        engine.attach(Lookahead(update="c", name="other"))


def test_a_group_that_is_added_to_the_optimizer_has_slow_weights_from_then_on() -> None:
    model: Any = mlp(5, 8, 1)
    update = Update.supervised(
        nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1), parameters=lambda engine: model[0].parameters()
    )
    engine = Engine(update, model=model, seed=0, allow=["W10", "W11", "W75", "W92"])
    engine.attach(handler := Lookahead(4, 0.5))
    before = model[1].weight.detach().clone()

    @engine.on(Events.ITERATION_COMPLETED(once=1))
    def add(engine: Engine) -> None:
        optimizer = engine.updates[0].optimizer
        assert optimizer is not None
        optimizer.add_param_group({"params": list(model[1].parameters())})

    engine.run(batches(), max_iters=2, check=False)
    assert list(handler.parameter_copies()) == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
    assert not torch.equal(model[1].weight, before)
    assert torch.equal(handler.parameter_copies()["model.1.weight"], model[1].weight)
    engine.run(batches(), max_iters=4, check=False)
    assert torch.equal(handler.parameter_copies()["model.1.weight"], model[1].weight)


def test_pruned_weights_stay_zero() -> None:
    for order in (1, -1):
        engine = build(*[Lookahead(2, 0.5), Pruning(0.5, start=3)][::order])
        run(engine)
        assert int((engine.model[0].weight == 0).sum()) + int((engine.model[3].weight == 0).sum()) == 24


def test_slow_weights_of_half_precision_are_kept_in_single_precision() -> None:
    engine = build(Lookahead(2, 0.3), TruePrecision("bf16"), optimizer=SGD, model=mlp(5, 8, 1))
    run(engine)
    plain = mlp(5, 8, 1).bfloat16()
    optimizer = SGD(plain.parameters())
    slow = [p.detach().float() for p in plain.parameters()]
    for iteration, (inputs, targets) in enumerate(batches() * 3, 1):
        nn.functional.mse_loss(plain(inputs.bfloat16()), targets.bfloat16()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if iteration % 2 == 0:
            with torch.no_grad():
                for one, parameter in zip(slow, plain.parameters(), strict=True):
                    one.lerp_(parameter.float(), 0.3)
                    parameter.copy_(one)
    assert_same(engine.model, plain)


def _sharded(distribute: bool) -> dict[str, Tensor]:
    engine = build(Lookahead(2, 0.5, evaluate=True), optimizer=SGD, model=mlp(6, 8, 2))
    if distribute:
        engine.attach(FullyShardedDataParallel())
    engine.run(batches(4, 6, 2), max_iters=3, check=False)
    return {name: whole_tensor(value) for name, value in engine.weights()["model"].items()}


@pytest.mark.slow
def test_sharded_weights_have_sharded_slow_ones() -> None:
    for of_rank in run_together(_sharded, 1, True):
        assert_same(of_rank, _sharded(False))
    first, second = run_together(_sharded, 2, True)
    assert_same(first, second)


@pytest.mark.moderate
@pytest.mark.parametrize("evaluate", [False, True])
def test_it_keeps_the_promises_of_a_handler_and_can_be_copied(evaluate: bool) -> None:
    check_handler(build, lambda: Lookahead(3, evaluate=evaluate), batches(4), max_epochs=2)
    used = run(build(Lookahead(4)), max_iters=6).handlers["lookahead"]
    assert digest(copy.deepcopy(used).state_dict()) == digest(used.state_dict())


def test_what_cannot_be_meant_is_refused_and_a_run_that_is_too_short_reported() -> None:
    with pytest.raises(ValueError, match="both 'one' and 'two' control the slow weights of update 'main'"):
        build(Lookahead(name="one"), Lookahead(name="two"))
    with pytest.raises(ValueError, match=r"'ema' and 'lookahead' .* set evaluate=False for one of them"):
        build(EMA(), Lookahead(evaluate=True))
    with pytest.raises(RuntimeError, match=r"'lookahead': in_place\(\) needs"), Lookahead().in_place():
        pass
    with pytest.warns(FindingWarning, match="synchronizes every 50 optimizer steps, but the run takes only 18"):
        run(build(Lookahead(50)))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    quick(
        [
            ({"k": 0}, ValueError, "k=0"),
            ({"k": 2.5}, TypeError, "k=2.5"),
            ({"alpha": 0}, ValueError, "alpha=0"),
            ({"alpha": 1.1}, ValueError, "alpha=1.1"),
            ({"evaluate": 1}, TypeError, "evaluate=1"),
        ],
        ({"k": 0}, ValueError, "k=0"),
    ),
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"Lookahead\({message}\)"):
        Lookahead(**options)
