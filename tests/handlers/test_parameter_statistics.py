"""ParameterStatistics against what torch computes from the weights of plain loops."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update
from signalfire.handlers import (
    FullyShardedDataParallel,
    GradientAccumulation,
    History,
    ParameterStatistics,
    Pruning,
)
from tests import kit
from tests.processes import run_together

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
batches = partial(kit.batches, scale=5.0)


def network() -> nn.Sequential:
    return kit.mlp(5, 8, 1, nn.Tanh())


def build(model: nn.Module | None = None) -> Engine:
    return kit.build(model or network(), optimizer=SGD)


def written(engine: Engine, *handlers: Any, count: int = 6) -> list[tuple[int, dict[str, float]]]:
    """The iteration and the metrics at which something new was written."""
    engine.attach(*handlers)
    seen = kit.new_metrics(engine)
    engine.run(batches(count), max_epochs=1)
    return seen


def statistics(before: list[Tensor], after: list[Tensor]) -> dict[str, float]:
    old, new = (torch.cat([one.flatten() for one in several]) for several in (before, after))
    return {
        "weight_norm": new.norm().item(),
        "weight_mean": new.mean().item(),
        "weight_sd": new.std(correction=0).item(),
        "weight_zeros": (new == 0).float().mean().item(),
        "update_ratio": ((new - old).norm() / old.norm()).item(),
    }


def plain_loop(every: int, count: int = 6) -> list[tuple[int, dict[str, float]]]:
    model = network()
    optimizer, found = SGD(model.parameters()), []
    for step, (x, y) in enumerate(batches(count), 1):
        nn.functional.mse_loss(model(x), y).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            after = {name: p.detach().clone() for name, p in model.named_parameters()}
            values = statistics([*before.values()], [*after.values()])
            for name, one in after.items():
                values |= {f"{kind}/{name}": value for kind, value in statistics([before[name]], [one]).items()}
            found.append((step, values))
    return found


@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_statistics_are_those_of_a_plain_loop(every: int) -> None:
    found, expected = written(build(), ParameterStatistics(every=f"{every}st")), plain_loop(every)
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (_, measured), (_, computed) in zip(found, expected, strict=True):
        assert measured == pytest.approx(computed, rel=1e-5, abs=1e-6)


def test_only_the_totals_or_the_chosen_parameters() -> None:
    ((_, totals),) = written(build(), ParameterStatistics(every="6st", per_parameter=False))
    assert {*totals} == {"weight_norm", "weight_mean", "weight_sd", "weight_zeros", "update_ratio"}
    ((_, chosen),) = written(build(), ParameterStatistics(every="6st", parameters=["*.bias"]))
    assert {name.partition("/")[2] for name in chosen} == {"", "0.bias", "2.bias"}
    (_, expected) = plain_loop(6)[0]
    assert chosen["weight_norm"] == pytest.approx(
        (expected["weight_norm/0.bias"] ** 2 + expected["weight_norm/2.bias"] ** 2) ** 0.5, rel=1e-5
    )


def test_steps_are_counted_and_skipped_ones_are_not_measured() -> None:
    engine = build()
    engine.connect(Events.GRADIENTS_READY(once=4), lambda engine: engine.state.update.skip("for the test"))
    found = written(engine, ParameterStatistics(every="1st", per_parameter=False), GradientAccumulation(2), count=8)
    assert [iteration for iteration, _ in found] == [2, 6, 8]


def test_what_pruning_has_set_to_zero_is_counted() -> None:
    (*_, (_, found)) = written(build(), ParameterStatistics(every="6st", per_parameter=False), Pruning(0.5))
    assert found["weight_zeros"] == pytest.approx(24 / 57)


def test_of_several_updates_each_has_its_own() -> None:
    model = network()

    def update(name: str, place: int) -> Update:
        return Update.supervised(
            nn.functional.mse_loss, SGD, name=name, parameters=lambda engine: model[place].parameters()
        )

    engine = Engine([update("one", 0), update("other", 2)], model=model, seed=0)
    engine.attach(history := History())
    ((_, found),) = written(engine, ParameterStatistics(every="6st", update="other"))
    assert {name.partition("/")[2] for name in found} == {"other", "other/2.weight", "other/2.bias"}
    assert history is engine.find(History)


def test_they_are_tensors_which_nobody_has_waited_for() -> None:
    engine = build()
    written(engine, ParameterStatistics(every="6st", per_parameter=False))
    assert isinstance(engine.state.metrics["update_ratio"], Tensor)
    assert engine.state.metrics.owners["update_ratio"] == "parameter_statistics"


@pytest.mark.parametrize("wrong", [{"every": "5ep"}, {"per_parameter": 1}, {"parameters": [1]}, {"update": ""}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        ParameterStatistics(**wrong)


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    engine = build()
    engine.attach(ParameterStatistics(parameters="head"))
    with pytest.raises(ValueError, match="'head' matches no parameter"):
        engine.run(batches(6), max_epochs=1)


def sharded() -> str:
    engine = build()
    engine.attach(FullyShardedDataParallel(timeout=60.0), ParameterStatistics())
    with pytest.raises(ValueError, match="is sharded over the ranks") as caught:
        engine.run(batches(6), max_epochs=1)
    return str(caught.value)


@pytest.mark.slow
def test_sharded_parameters_are_refused() -> None:
    assert all("'0.weight'" in one for one in run_together(sharded, 2))
