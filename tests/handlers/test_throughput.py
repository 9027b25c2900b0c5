"""Throughput under a clock that the tests move, and against formulas."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signalfire import Engine, Events, Update
from signalfire.handlers import (
    Average,
    Checkpoint,
    DistributedDataParallel,
    GradientAccumulation,
    Metrics,
    SharpnessAwareMinimization,
    Throughput,
    Validation,
)
from tests import kit
from tests.processes import assert_alike, run_together

SGD = partial(torch.optim.SGD, lr=0.01)
RATES = ("samples_per_second", "batches_per_second", "steps_per_second")


class Clock:
    """Time passes only where a test lets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-9
        return self.now

    def passes(self, seconds: float) -> Any:
        def receiver(engine: Engine) -> None:
            self.now += seconds

        return receiver


def data(count: int, size: int = 32, width: int = 5) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, width, generator=generator), torch.randn(size, 1, generator=generator)) for _ in range(count)
    ]


def build(model: nn.Module | None = None) -> Engine:
    return kit.build(model or kit.mlp(5, 8, 1, nn.Tanh()), optimizer=SGD)


def timed(engine: Engine, clock: Clock, seconds: float = 0.01) -> None:
    engine.connect(Events.FORWARD_STARTED, clock.passes(seconds))


def measured(engine: Engine, count: int = 100, epochs: int = 1, **bounds: Any) -> list[tuple[int, dict[str, float]]]:
    seen = kit.new_metrics(engine)
    engine.run(data(count), max_epochs=epochs, **bounds)
    return seen


def test_rates_are_those_of_the_iterations_after_the_warm_up() -> None:
    engine, clock = build(), Clock()
    engine.connect(Events.ITERATION_STARTED(before=6), clock.passes(3.0))  # compilation, and caches that fill
    timed(engine, clock)
    engine.attach(Throughput(every="20it", clock=clock, tokens=lambda batch: batch[0].numel()))
    found = measured(engine)
    assert [iteration for iteration, _ in found] == [20, 40, 60, 80, 100]
    for _, values in found:
        assert [values[name] for name in RATES] == pytest.approx([3200, 100, 100])
        assert values["tokens_per_second"] == pytest.approx(16000)


def test_evaluations_and_checkpoints_do_not_count(tmp_path: Path) -> None:
    engine, clock = build(), Clock()
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=engine.modules["model"])
    evaluator.attach(Metrics(val_loss=Average()))
    evaluator.connect(Events.FORWARD_STARTED, clock.passes(5.0))
    timed(engine, clock)
    engine.connect(Events.CHECKPOINT_SAVING, clock.passes(7.0))
    engine.attach(
        Validation(evaluator, data(2), every="25it"),
        Checkpoint(tmp_path, every="15it"),
        Throughput(every="20it", clock=clock),
    )
    found = [values for _, values in measured(engine) if "samples_per_second" in values]
    assert [values["samples_per_second"] for values in found] == pytest.approx([3200] * 5)


def test_a_step_of_accumulated_batches_is_one_step() -> None:
    engine, clock = build(), Clock()
    timed(engine, clock)
    engine.attach(Throughput(every="20it", warmup=20, clock=clock), GradientAccumulation(4))
    for _, values in measured(engine):
        assert [values[name] for name in RATES] == pytest.approx([3200, 100, 25])


def test_a_resumed_run_warms_up_again_and_shows_no_drop() -> None:
    def one(clock: Clock) -> Engine:
        engine = build()
        timed(engine, clock)
        engine.connect(Events.STARTED, clock.passes(60.0))
        engine.attach(Throughput(every="20it", clock=clock))
        return engine

    clock = Clock()
    first, second = one(clock), one(clock)
    first.run(data(100), max_iters=50)
    second.load_state_dict(first.state_dict())
    found = measured(second)
    assert [iteration for iteration, _ in found] == [80, 100]
    assert "samples_per_second" in second.state.metrics
    assert not second.state_dict()["engine"]["metrics"]["values"], "a speed is no part of what a resumed run repeats"
    assert all(values["samples_per_second"] == pytest.approx(3200) for _, values in found)


def test_the_share_of_waiting_for_data() -> None:
    engine, clock = build(), Clock()
    timed(engine, clock, 0.03)
    engine.connect(Events.GET_BATCH_STARTED, clock.passes(5.0))  # of a receiver, which is not the data's
    engine.attach(Throughput(every="20it", waiting=True, clock=clock))

    class Slow(list[Any]):
        def __iter__(self) -> Any:
            for one in super().__iter__():
                clock.now += 0.97
                yield one

    engine.run(Slow(data(40)), max_epochs=1)
    assert engine.state.metrics["waiting_for_data"] == pytest.approx(0.97 / 6)


def test_operations_are_those_of_forward_and_backward_and_accumulation_changes_nothing() -> None:
    for accumulate in (1, 4):
        clock = Clock()
        engine = build(nn.Linear(5, 1))
        timed(engine, clock)
        engine.attach(Throughput(every="20it", flops="count", peak=1e6, clock=clock))
        engine.attach(GradientAccumulation(accumulate))
        (*_, (_, values)) = measured(engine)
        # A first layer whose input needs no gradient: the products of the forward, and those of the weights' gradients.
        assert values["flops_per_second"] == pytest.approx(2 * (2 * 32 * 5 * 1) / 0.01, rel=1e-6)
        assert values["mfu"] == pytest.approx(2 * (2 * 32 * 5) / 0.01 / 1e6, rel=1e-6)


def test_gradients_that_are_computed_twice_are_counted_once() -> None:
    engine, clock = build(nn.Linear(5, 1)), Clock()
    engine.connect(Events.ITERATION_STARTED, clock.passes(0.01))
    engine.attach(Throughput(every="20it", flops="count", clock=clock), SharpnessAwareMinimization(0.1))
    (*_, (_, values)) = measured(engine)
    assert values["flops_per_second"] == pytest.approx(2 * (2 * 32 * 5 * 1) / 0.01, rel=1e-6)


@pytest.mark.parametrize("flops", [30.0, lambda batch: 30.0 * len(batch[0])])
def test_operations_may_be_given_for_a_sample_or_by_batch(flops: Any) -> None:
    engine, clock = build(), Clock()
    timed(engine, clock)
    engine.attach(Throughput(every="20it", flops=flops, clock=clock))
    (*_, (_, values)) = measured(engine)
    assert values["flops_per_second"] == pytest.approx(30 * 3200)
    assert "mfu" not in values


def test_only_what_is_asked_for_is_announced() -> None:
    engine = build()
    engine.attach(Throughput())
    assert engine.handlers["throughput"].metric_names(engine) == [*RATES]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": "often"}, "every='often'"),
        ({"warmup": 0}, "warmup=0"),
        ({"tokens": 3}, "tokens=3"),
        ({"flops": "all"}, "flops='all'"),
        ({"flops": -1}, "flops=-1"),
        ({"peak": 1e12}, "give flops= as well"),
        ({"waiting": "yes"}, "waiting='yes'"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Throughput(**wrong)


def together() -> list[Any]:
    engine, clock = build(), Clock()
    engine.attach(DistributedDataParallel(timeout=60.0))
    timed(engine, clock)
    engine.attach(Throughput(every="20it", flops=10.0, peak=1e6, clock=clock))
    (*_, (_, values)) = measured(engine, count=201)
    return [values["samples_per_second"], values["mfu"]]


def test_rates_are_those_of_all_processes_together() -> None:
    samples, mfu = assert_alike(run_together(together, 2))
    assert samples == pytest.approx(6400)
    assert mfu == pytest.approx(10 * 6400 / 1e6 / 2)
