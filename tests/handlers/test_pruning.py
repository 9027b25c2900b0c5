"""Pruning against plain loops that mask weights, gradients and moments themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events
from signalfire.handlers import (
    EMA,
    SWA,
    Checkpoint,
    Freezing,
    FullyShardedDataParallel,
    GradientClipping,
    GradientNoise,
    History,
    MixedPrecision,
    Pruning,
)
from tests import kit
from tests.kit import quick
from tests.processes import run_together

ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
batches = partial(kit.batches, scale=5.0)


def network() -> nn.Sequential:
    return kit.mlp(5, 8, 1, nn.Tanh())


def build(optimizer: Callable[..., torch.optim.Optimizer] = ADAMW, model: nn.Module | None = None) -> Engine:
    return kit.build(model or network(), optimizer=optimizer)


def zeros(model: nn.Module) -> dict[str, int]:
    return {name: int((p == 0).sum()) for name, p in model.named_parameters()}


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def plain_loop(steps: dict[int, float], *, count: int, epochs: int, max_norm: float | None = None) -> list[Tensor]:
    """Trains with AdamW; by number of steps, the share of all weights of both layers that is zero from then on."""
    model = network()
    optimizer = ADAMW(model.parameters())
    layers = [p for p in model.parameters() if p.dim() > 1]
    masks = [torch.zeros_like(p, dtype=torch.bool) for p in layers]

    @torch.no_grad()
    def prune(share: float) -> None:
        sizes = torch.cat([p.abs().masked_fill(mask, -1).flatten() for p, mask in zip(layers, masks, strict=True)])
        smallest = set(sizes.argsort()[: round(share * len(sizes))].tolist())
        place = 0
        for p, mask in zip(layers, masks, strict=True):
            for index in range(p.numel()):
                mask.view(-1)[index] |= place + index in smallest
            place += p.numel()
            p[mask] = 0
            for value in optimizer.state.get(p, {}).values():
                if value.shape == p.shape:
                    value[mask] = 0

    made = 0
    if 0 in steps:
        prune(steps[0])
    for _ in range(epochs):
        for x, y in batches(count):
            nn.functional.mse_loss(model(x), y).backward()
            for p, mask in zip(layers, masks, strict=True):
                assert p.grad is not None
                p.grad[mask] = 0
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            made += 1
            with torch.no_grad():
                for p, mask in zip(layers, masks, strict=True):
                    p[mask] = 0
            if made in steps:
                prune(steps[made])
    return weights_of(model)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_weights_are_those_of_a_plain_loop(max_norm: float | None) -> None:
    engine = build()
    engine.attach(Pruning(0.75, start=2, end=8, every=3))
    if max_norm is not None:
        engine.attach(GradientClipping(max_norm))
    engine.run(batches(6), max_epochs=2)
    steps = {2: 0.0, 5: 0.75 * (1 - 0.5**3), 8: 0.75}
    expected = plain_loop(steps, count=6, epochs=2, max_norm=max_norm)
    assert all(map(torch.equal, weights_of(engine.modules["model"]), expected))
    assert sum(zeros(engine.modules["model"]).values()) == round(0.75 * 48)


def test_all_at_once_before_the_first_step() -> None:
    engine = build()
    engine.attach(Pruning(0.5))
    engine.run(batches(6), max_epochs=1)
    assert all(map(torch.equal, weights_of(engine.modules["model"]), plain_loop({0: 0.5}, count=6, epochs=1)))


def test_each_layer_loses_the_same_share_or_the_smallest_of_all_go() -> None:
    found = []
    for handler in (Pruning(0.5, scope="layer"), Pruning(0.5)):
        model = network()
        engine = build(model=model)
        engine.attach(handler)
        engine.run(batches(1), max_epochs=1)
        found.append({name: count for name, count in zeros(model).items() if count})
    assert found[0] == {"0.weight": 20, "2.weight": 4}
    assert sum(found[1].values()) == 24
    assert found[1] != found[0]


def test_a_structure_keeps_the_largest_of_each_group() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 6)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 1))
    before = layer.weight.detach().clone()
    engine = build(SGD, model)
    engine.attach(Pruning(structure="2:4", parameters="0.weight"))
    kept: list[Tensor] = []
    engine.connect(Events.EPOCH_STARTED(once=1), lambda engine: kept.append(layer.weight.detach().clone()))
    engine.run([(torch.randn(4, 8), torch.randn(4, 1))] * 5, max_epochs=2)
    groups = before.view(-1, 4)
    for group, left in zip(groups, kept[0].view(-1, 4), strict=True):
        largest = group.abs().argsort(descending=True)[:2]
        assert left.nonzero().flatten().tolist() == sorted(largest.tolist())
        assert torch.equal(left[largest], group[largest])
    assert ((layer.weight.view(-1, 4) == 0).sum(1) == 2).all()
    assert zeros(model)["2.weight"] == 0


@pytest.mark.slow
def test_zeros_stay_zero_for_a_thousand_steps_in_weights_moments_and_averages() -> None:
    engine, ema, swa = build(), EMA(0.9, evaluate=False), SWA(2, bn_batches=0)
    pruning = Pruning(0.8, start=100, end=500, every=50)
    engine.attach(ema, swa, pruning, GradientNoise(0.1))
    engine.run(batches(10), max_epochs=100)
    (optimizer,) = (update.optimizer for update in engine.updates)
    assert optimizer is not None
    model = engine.modules["model"]
    named = dict(model.named_parameters())
    assert pruning.sparsity == round(0.8 * 48) / 48
    for name, mask in pruning.masks.items():
        assert mask.any()
        copies = [value for value in optimizer.state[named[name]].values() if value.shape == mask.shape]
        assert len(copies) == 2
        averages = [average.parameter_copies()[f"model.{name}"] for average in (ema, swa)]
        for one in (named[name], *copies, *averages, engine.weights()["model"][name]):
            assert not one[mask].any()


def test_what_a_parametrization_computes_a_weight_from_is_refused() -> None:
    engine = build()
    nn.utils.parametrizations.weight_norm(engine.modules["model"].get_submodule("2"))
    engine.attach(Pruning(0.5))
    with pytest.raises(ValueError, match=r"computes a weight from '2\.parametrizations\.weight\.original0'"):
        engine.run(batches(3), max_epochs=1, check=False)


def test_averages_that_began_before_have_the_same_zeros_at_once() -> None:
    engine, ema = build(), EMA(0.5)
    pruning = Pruning(0.5, start=4)
    engine.attach(ema, pruning)
    seen: list[int] = []
    engine.connect(
        Events.ITERATION_COMPLETED,
        lambda engine: seen.append(sum(int((one == 0).sum()) for one in ema.parameter_copies().values())),
    )
    engine.run(batches(6), max_epochs=1)
    assert seen == [0, 0, 0, 24, 24, 24]


@pytest.mark.moderate
def test_every_checkpoint_is_sparse_and_has_the_keys_of_the_model(tmp_path: Path) -> None:
    engine = build()
    engine.attach(Pruning(0.5, start=3, end=9, every=2), EMA(0.5))
    engine.attach(saving := Checkpoint(tmp_path, every="1it", keep=20))
    engine.run(batches(6), max_epochs=2)
    found = []
    for path in sorted(tmp_path.iterdir()):
        state = saving.load(path)
        weights, averages = state["modules"]["model"], state["handlers"]["ema"]["averages"]
        assert [*weights] == [*network().state_dict()]
        masks = state["handlers"]["pruning"]["masks"]
        for name, mask in masks.items():
            assert not weights[name][mask].any()
            assert not averages[f"model.{name}"][mask].any()
        found.append(sum(int(mask.sum()) for mask in masks.values()))
    shares = [round(0.5 * (1 - (1 - step / 6) ** 3) * 48) for step in (2, 4, 6)]
    assert sorted(found) == sorted([0, 0, 0, 0, shares[0], shares[0], shares[1], shares[1], *[shares[2]] * 4])


@pytest.mark.filterwarnings("ignore:C17")
@pytest.mark.parametrize("cut", quick(range(1, 12), 5))
def test_a_run_resumed_inside_the_schedule_ends_like_one_that_was_not_stopped(cut: int) -> None:
    def one() -> tuple[Engine, Pruning]:
        engine, handler = build(), Pruning(0.8, start=2, end=10, every=2, scope="layer")
        engine.attach(handler, EMA(0.9), GradientClipping(1.0))
        return engine, handler

    whole, handler = one()
    whole.run(batches(6), max_epochs=2)
    first, _ = one()
    first.run(batches(6), max_iters=cut)
    second, other = one()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.run(batches(6), max_epochs=2)
    assert all(map(torch.equal, weights_of(whole.modules["model"]), weights_of(second.modules["model"])))
    assert all(torch.equal(mask, other.masks[name]) for name, mask in handler.masks.items())


def test_detaching_leaves_the_zeros_and_nothing_else() -> None:
    engine = build(SGD)
    handler = Pruning(0.5)
    attachment = engine.attach(handler)
    engine.run(batches(6), max_epochs=1)
    pruned = weights_of(engine.modules["model"])
    attachment.detach()
    assert all(map(torch.equal, weights_of(engine.modules["model"]), pruned))
    engine.run(batches(6), max_epochs=2)
    assert sum(zeros(engine.modules["model"]).values()) < 24
    copied = copy.deepcopy(engine.modules["model"])
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in network().named_parameters()]


def test_frozen_parameters_are_neither_pruned_nor_counted() -> None:
    engine = build()
    engine.attach(Freezing({"0": 2}), handler := Pruning(0.5, start=2))
    engine.run(batches(6), max_epochs=1)
    assert zeros(engine.modules["model"]) == {"0.weight": 0, "0.bias": 0, "2.weight": 4, "2.bias": 0}
    assert set(handler.masks) == {"2.weight"}


def test_as_many_are_pruned_as_are_due_also_where_other_weights_are_zero() -> None:
    layer = nn.Linear(40, 1)
    with torch.no_grad():
        layer.weight.fill_(1)[:, 36:] = 0.01
    state = copy.deepcopy(layer.state_dict())
    state["weight"][:, :30] = 0
    engine = build(SGD, layer)
    engine.attach(handler := Pruning(0.8, end=8, every=1, schedule=lambda progress: progress))
    engine.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: engine.load_weights({"model": state}))
    seen: list[int] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: seen.append(round(handler.sparsity * 40)))
    engine.run([(torch.zeros(4, 40), torch.randn(4, 1)) for _ in range(8)], max_epochs=1)
    assert seen == [4, 8, 12, 16, 20, 24, 28, 32]


def test_what_is_pruned_stays_so_where_the_schedule_decreases() -> None:
    engine = build()
    engine.attach(handler := Pruning(0.5, end=6, every=1, schedule=lambda progress: 1 - progress))
    engine.run(batches(6), max_epochs=1)
    assert handler.sparsity == 0.5
    assert sum(zeros(engine.modules["model"]).values()) == 24


def test_loaded_weights_get_the_zeros() -> None:
    engine = build()
    engine.attach(Pruning(0.5))
    dense = network()

    def load(engine: Engine) -> None:
        engine.load_weights({"model": dense.state_dict()})
        assert sum(zeros(engine.modules["model"]).values()) == 24

    engine.connect(Events.ITERATION_COMPLETED(once=2), load)
    engine.run(batches(6), max_epochs=1)


def test_a_step_that_is_skipped_is_no_step_of_the_schedule() -> None:
    engine = build()
    engine.attach(handler := Pruning(0.5, start=3), MixedPrecision("fp16", init_scale=2.0**40))
    seen: list[tuple[int, bool]] = []
    engine.connect(
        Events.ITERATION_COMPLETED, lambda engine: seen.append((engine.updates[0].steps, bool(handler.masks)))
    )
    engine.run(batches(40), max_epochs=1)
    assert seen[-1][0] < 40
    assert all(pruned == (steps >= 3) for steps, pruned in seen)


def test_the_share_of_zeros_is_a_metric() -> None:
    engine, history = build(), History()
    engine.attach(handler := Pruning(0.75, start=6, end=12, every=6, schedule=lambda progress: progress), history)
    engine.run(batches(6), max_epochs=2)
    assert engine.state.metrics["sparsity"] == handler.sparsity == 0.75
    assert engine.state.metrics.owners["sparsity"] == "pruning"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "pass exactly one of the two"),
        ({"amount": 80}, "amount=80"),
        ({"amount": 0.5, "structure": "2:4"}, "pass exactly one of the two"),
        ({"structure": "4:2"}, "to keep n of every m weights"),
        ({"structure": "2:4", "end": 5}, "omit end="),
        ({"amount": 0.5, "start": 10, "end": 5}, "end=5"),
        ({"amount": 0.5, "scope": "all"}, "scope='all'"),
        ({"amount": 0.5, "schedule": 0.5}, "schedule=0.5"),
        ({"amount": 0.5, "parameters": [3]}, "parameters="),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Pruning(**wrong)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (Pruning(0.5, parameters="head"), "'head' matches no parameter"),
        (Pruning(structure="2:4"), "structure='2:4' requires .* to be a multiple of 4, but '0.weight' has shape"),
        (Pruning(0.5, schedule=lambda progress: 2.0), r"schedule\(1\) returned 2.0"),
        (Pruning(0.5, update="other"), "other"),
    ],
)
def test_what_does_not_fit_the_model_is_an_error_before_the_first_step(handler: Pruning, message: str) -> None:
    engine = build()

    def attach_and_run() -> None:
        engine.attach(handler)
        engine.run(batches(6), max_epochs=1)

    with pytest.raises((KeyError, ValueError), match=message):
        attach_and_run()
    assert engine.state.iteration == 0


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 1))
    engine = build(partial(torch.optim.SGD, lr=0.1), model)
    engine.attach(Pruning(0.5))
    with pytest.raises(TypeError, match=r"the gradient of '0.weight' is sparse.*parameters="):
        engine.run([(torch.arange(8).reshape(4, 2), torch.randn(4, 1))] * 3, max_epochs=1)


def test_an_end_after_the_last_step_is_reported() -> None:
    engine = build()
    engine.attach(Pruning(0.5, end=100))
    with pytest.warns(
        UserWarning, match="C17.*'pruning' reaches its final amount after 100 optimizer steps, but the run takes only 6"
    ):
        engine.run(batches(6), max_epochs=1)


def sharded() -> str:
    engine = build()
    engine.attach(FullyShardedDataParallel(timeout=60.0), Pruning(0.5))
    with pytest.raises(ValueError, match="is sharded over the ranks") as caught:
        engine.run(batches(6), max_epochs=1)
    return str(caught.value)


@pytest.mark.slow
def test_sharded_parameters_are_refused() -> None:
    assert all("'0.weight'" in one for one in run_together(sharded, 2))
