"""AutoClip against a plain loop that keeps the norms in a list."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update
from signalfire.distributed import whole_tensor
from signalfire.handlers import (
    AutoClip,
    FullyShardedDataParallel,
    GradientAccumulation,
    GradientClipping,
    MixedPrecision,
    NonFiniteGuard,
    SharpnessAwareMinimization,
)
from signalfire.testing import check_handler
from tests import kit
from tests.kit import assert_same, average_gradients, batches, mlp, same, windows
from tests.processes import run_together

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.Tanh())


def build(*handlers: Any, **options: Any) -> Engine:
    return kit.build(network(), *handlers, optimizer=SGD, **options)


def plain_loop(
    percentile: float = 10.0,
    *,
    steps: int = 1000,
    window: int = 1,
    scale: float | None = None,
    spoilt: tuple[int, ...] = (),
) -> tuple[nn.Module, list[Tensor]]:
    """The model and the norms that count; spoilt batches have targets that are not finite, and their steps are skipped."""
    model = network()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=3, enabled=scale is not None)
    norms: list[Tensor] = []
    iteration = 0
    for _ in range(3):
        for chunk in windows(batches(), window):
            for x, y in chunk:
                iteration += 1
                y = y * math.inf if iteration in spoilt else y
                with torch.autocast("cpu", dtype=torch.float16, enabled=scale is not None):
                    loss = nn.functional.mse_loss(model(x), y)
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            scaler.unscale_(optimizer)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            if norm.isfinite():
                norms.append(norm)
                bound = torch.quantile(torch.stack(norms[-steps:]), percentile / 100)
                assert bound.item() == pytest.approx(np.percentile([n.item() for n in norms[-steps:]], percentile))
                nn.utils.clip_grads_with_norm_(model.parameters(), bound.item(), norm)
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, norms


@pytest.mark.moderate
@pytest.mark.parametrize("percentile", [10, 37.5, 100])
@pytest.mark.parametrize(("steps", "window"), [(1000, 1), (1000, 4), (4, 1), (1, 1)])
def test_weights_equal_a_plain_loop(percentile: float, steps: int, window: int) -> None:
    engine = build(AutoClip(percentile, window=steps), GradientAccumulation(window))
    engine.run(batches(), max_epochs=3)
    model, norms = plain_loop(percentile, steps=steps, window=window)
    assert_same(engine.model, model)
    handler = engine.find(AutoClip)
    assert handler.total_norm == norms[-1]
    assert sorted(handler.state_dict()["main"]["norms"].tolist()) == sorted(float(n) for n in norms[-steps:])
    if percentile < 100 and window == 1:
        assert not same(engine.model, plain_loop(100)[0])


def test_of_all_steps_as_in_the_paper() -> None:
    engine = build(AutoClip(25, window=None))
    engine.run(batches(), max_epochs=3)
    assert_same(engine.model, plain_loop(25)[0])
    assert len(engine.find(AutoClip).state_dict()["main"]["norms"]) == 18


@pytest.mark.moderate
def test_norms_of_skipped_steps_and_such_that_are_not_finite_are_left_out() -> None:
    expected, norms = plain_loop(30, steps=5, scale=2.0**17, spoilt=(4, 9))
    assert 5 < len(norms) < 16
    for order in itertools.permutations(range(2)):
        several = [AutoClip(30, window=5), MixedPrecision("fp16", init_scale=2.0**17, growth_interval=3)]
        engine = build(*(several[place] for place in order), allow=["W19"])
        spoil(engine, 4, 9)
        engine.run(batches(), max_epochs=3)
        assert_same(engine.model, expected)
    expected, norms = plain_loop(30, steps=5, spoilt=(1, 4, 9))
    assert len(norms) == 15
    engine = build(AutoClip(30, window=5), NonFiniteGuard(check="gradients"), allow=["W19"])
    spoil(engine, 1, 4, 9)
    engine.run(batches(), max_epochs=3)
    assert_same(engine.model, expected)


def spoil(engine: Engine, *iterations: int) -> None:
    @engine.on(Events.GET_BATCH_COMPLETED)
    def spoil(engine: Engine) -> None:
        if engine.state.iteration in iterations:
            x, y = engine.state.batch
            engine.state.batch = x, y * math.inf


def test_a_skip_by_the_user_leaves_the_norm_out_also_once_the_window_is_full() -> None:
    engine = build(AutoClip(50, window=3))
    seen: list[float] = []

    @engine.on(Events.OPTIMIZER_STEP_STARTED)
    def look(engine: Engine) -> None:
        total = engine.find(AutoClip).total_norm
        assert total is not None
        if engine.state.iteration in (2, 6):
            engine.state.update.skip("asked")
        else:
            seen.append(total.item())

    engine.run(batches(), max_iters=8)
    assert sorted(engine.find(AutoClip).state_dict()["main"]["norms"].tolist()) == sorted(seen[-3:])


def test_a_norm_that_is_not_finite_counts_for_nothing_even_if_the_step_is_made() -> None:
    model = nn.Linear(1, 1, bias=False)
    gradients = [math.inf, 3.0, math.inf, 1.0, math.nan, 2.0]
    update = Update.from_function(lambda engine, batch: model.weight.sum() * 0, partial(torch.optim.SGD, lr=0.0))
    engine = Engine(update, model=model, seed=0, allow=["W15", "W18", "W84"])
    engine.attach(AutoClip(50, window=None))
    bounds: list[float] = []

    @engine.on(Events.BACKWARD_COMPLETED)
    def give(engine: Engine) -> None:
        assert model.weight.grad is not None
        model.weight.grad.fill_(gradients[engine.state.iteration - 1])

    @engine.on(Events.OPTIMIZER_STEP_STARTED)
    def look(engine: Engine) -> None:
        bound = engine.find(AutoClip).max_norm
        assert bound is not None
        bounds.append(bound.item())
        assert model.weight.grad is not None
        if engine.state.iteration == 1:
            assert model.weight.grad.item() == math.inf  # nothing to clip it to
        model.weight.grad.zero_()

    engine.run(max_iters=6, check=False)
    assert math.isnan(bounds[0])
    assert bounds[1:] == [3.0, 3.0, 2.0, 2.0, 2.0]


def test_with_a_step_that_computes_its_gradients_twice_the_second_norm_stays() -> None:
    engine = build(AutoClip(50, window=3), SharpnessAwareMinimization(0.1))
    norms: list[float] = []

    @engine.on(Events.GRADIENTS_READY)
    def skip(engine: Engine) -> None:
        if engine.state.iteration == 5 and engine.state.update.evaluation == 1:
            engine.state.update.skip("asked")

    @engine.on(Events.OPTIMIZER_STEP_COMPLETED)
    def look(engine: Engine) -> None:
        total = engine.find(AutoClip).total_norm
        assert total is not None
        if engine.state.update.skipped is None:
            norms.append(total.item())
        kept = engine.find(AutoClip).state_dict()["main"]["norms"]
        assert sorted(kept.tolist()) == sorted(norms[-3:])

    engine.run(batches(), max_epochs=1)
    assert len(norms) == 5


def test_two_updates_have_norms_of_their_own_and_a_state_may_be_continued_with_another_window() -> None:
    models = {"a": nn.Linear(5, 1), "b": nn.Linear(5, 1)}

    def update(name: str, factor: float) -> Update:
        return Update.from_function(
            lambda engine, batch: factor * nn.functional.mse_loss(models[name](batch[0]), batch[1]),
            partial(torch.optim.SGD, lr=0.01),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    engine = Engine([update("a", 1), update("b", 1000)], model=models, seed=0)
    engine.attach(AutoClip(window=4))
    engine.run(batches(), max_epochs=1, check=False)
    state = engine.find(AutoClip).state_dict()
    assert state["a"]["norms"].max() < state["b"]["norms"].min()
    ordered = state["a"]["norms"].roll(-(6 % 4))
    for window in (2, 3, 4, 9, None):
        other = AutoClip(window=window)
        other.load_state_dict(state)
        kept = other.state_dict()["a"]
        assert sorted(kept["norms"].tolist()) == sorted(ordered[-(window or 4) :].tolist())
        if window != 4:
            assert torch.equal(kept["norms"], ordered[-(window or 4) :])
            assert kept["count"] == len(kept["norms"])


def _sharded(distribute: bool) -> dict[str, Tensor]:
    engine = kit.build(mlp(6, 8, 2), AutoClip(50), optimizer=SGD)
    if distribute:
        engine.attach(FullyShardedDataParallel())
    engine.run(batches(4, 6, 2), max_epochs=2, check=False)
    return {name: whole_tensor(value) for name, value in engine.weights()["model"].items()}


@pytest.mark.slow
def test_sharded_gradients_are_clipped_by_the_norm_of_all() -> None:
    assert_same(run_together(_sharded, 1, True)[0], _sharded(False))
    first, second = run_together(_sharded, 2, True)
    assert_same(first, second)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="both 'auto_clip' and 'gradient_clipping' control gradient clipping of upd"):
        build(AutoClip(), GradientClipping(1.0))
    update = Update.from_function(lambda engine, batch: engine.model(batch).sum(), partial(torch.optim.SGD, lr=0.1))
    engine = Engine(update, model=nn.Embedding(5, 3, sparse=True), seed=0)
    engine.attach(AutoClip())
    with pytest.raises(TypeError, match="'auto_clip': a gradient of update 'main' is sparse"):
        engine.run([torch.tensor([1, 1])], max_epochs=1, check=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"percentile": 0}, "percentile=0"), ({"percentile": 101}, "percentile=101"), ({"window": 0}, "window=0")],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"AutoClip\({message}\)"):
        AutoClip(**options)


@pytest.mark.moderate
def test_with_all_norms_it_keeps_the_promises_of_a_handler() -> None:
    check_handler(build, lambda: AutoClip(50, window=None), batches(4), max_epochs=2)
