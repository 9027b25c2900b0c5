"""Throughput under a clock that the tests move, and against formulas."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Connection, Engine, Events, Handler, Phase, Signal, Update
from signalfire.core.connection import Receiver
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
from signalfire.handlers._common.peaks import peak_of
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


@pytest.mark.moderate
@pytest.mark.parametrize("tokens", [lambda batch: batch[0].numel(), 0], ids=["a function", "an index"])
def test_rates_are_those_of_the_iterations_after_the_warm_up(tokens: Any) -> None:
    engine, clock = build(), Clock()
    engine.connect(Events.ITERATION_STARTED(before=6), clock.passes(3.0))  # compilation, and caches that fill
    timed(engine, clock)
    engine.attach(Throughput(every="20it", clock=clock, tokens=tokens))
    found = measured(engine)
    assert [iteration for iteration, _ in found] == [20, 40, 60, 80, 100]
    for _, values in found:
        assert [values[name] for name in RATES] == pytest.approx([3200, 100, 100])
        assert values["tokens_per_second"] == pytest.approx(16000)


@pytest.mark.moderate
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


class Slow(Handler):
    """A handler whose state takes a while, as that of a large model does."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def state_dict(self) -> dict[str, Any]:
        self.clock.now += 7.0
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    "options",
    [{"every": "3it"}, {"every": "1ep"}, {"every": "3it", "asynchronous": True}, {"monitor": "x", "mode": "min"}],
)
@pytest.mark.parametrize("every", ["5it", Events.CHECKPOINT_SAVED, Events.EVALUATION_COMPLETED], ids=str)
def test_the_time_of_a_save_and_of_an_evaluation_does_not_count(options: Any, every: Any, tmp_path: Path) -> None:
    engine, clock = build(), Clock()
    timed(engine, clock)
    engine.connect(Events.CHECKPOINT_SAVED, clock.passes(5.0))  # an upload
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.log("x", -engine.state.epoch), phase=Phase.PREPARE)
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=engine.modules["model"])
    evaluator.connect(Events.FORWARD_STARTED, clock.passes(3.0))
    engine.attach(
        Slow(clock),
        Checkpoint(tmp_path, sync_files=False, **options),
        Validation(evaluator, data(1), every="4it"),
        Throughput(every=every, warmup=1, clock=clock),
    )
    found = [values for _, values in measured(engine, 6, epochs=3) if "samples_per_second" in values]
    assert found
    assert [values["samples_per_second"] for values in found] == pytest.approx([3200] * len(found))
    assert clock.now > 10


def test_a_save_that_fails_leaves_the_clock_running(tmp_path: Path) -> None:
    engine, clock = build(), Clock()
    timed(engine, clock)
    engine.attach(Throughput(every="5it", warmup=1, clock=clock))

    @engine.on(Events.ITERATION_COMPLETED)
    def save(engine: Engine) -> None:
        with suppress(OSError), engine.snapshots.saving():
            clock.now += 7.0
            raise OSError

    assert [values["samples_per_second"] for _, values in measured(engine, 10)] == pytest.approx([3200, 3200])


@pytest.mark.parametrize("kind", [tuple, list, dict, Tensor])
def test_the_samples_of_each_batch_are_counted(kind: type) -> None:
    update = Update.from_function(lambda engine, batch: engine.model(torch.ones(1, 1)).sum(), SGD)
    engine, clock = Engine(update, model=nn.Linear(1, 1)), Clock()
    engine.connect(Events.ITERATION_STARTED, clock.passes(1.0))
    engine.attach(Throughput(every="3it", warmup=1, clock=clock))
    sizes = [torch.ones(size, 2) for size in (9, 1, 2, 3, 4, 5, 6)]
    batches = [kind([one, one]) if kind in (tuple, list) else {"x": one} if kind is dict else one for one in sizes]
    engine.run(batches, max_epochs=1)
    assert engine.state.metrics["samples_per_second"] == pytest.approx((3 + 4 + 5) / 3)


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


@pytest.mark.moderate
def test_gradients_that_are_computed_twice_are_counted_once() -> None:
    engine, clock = build(nn.Linear(5, 1)), Clock()
    engine.connect(Events.ITERATION_STARTED, clock.passes(0.01))
    engine.attach(Throughput(every="20it", flops="count", clock=clock), SharpnessAwareMinimization(0.1))
    (*_, (_, values)) = measured(engine)
    assert values["flops_per_second"] == pytest.approx(2 * (2 * 32 * 5 * 1) / 0.01, rel=1e-6)


def test_the_operations_of_a_large_layer_are_the_formula() -> None:
    engine, clock = build(nn.Linear(1024, 1024)), Clock()
    timed(engine, clock)
    engine.attach(Throughput(every="3it", warmup=2, flops="count", peak=1e12, clock=clock))
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(64, 1024, generator=generator), torch.randn(64, 1024, generator=generator)
    engine.run([batch] * 3, max_epochs=1)
    # The forward, and the weights' gradients: the input needs none.
    expected = 2 * (2 * 64 * 1024 * 1024) / 0.01
    assert engine.state.metrics["flops_per_second"] == pytest.approx(expected, rel=1e-6)
    assert engine.state.metrics["mfu"] == pytest.approx(expected / 1e12, rel=1e-6)


def test_of_an_unknown_device_there_is_no_mfu_and_a_line_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    engine = build()
    engine.attach(Throughput(every="20it", flops=30.0))
    (*_, (_, values)) = measured(engine)
    assert "mfu" not in values
    assert not any("mfu" in name for name in engine.handlers["throughput"].metric_names(engine))
    message = "throughput: 'mfu' is omitted, because the peak performance of 'cpu' is not known; pass peak=\n"
    assert capsys.readouterr().err == message
    for options in ({"flops": 30.0, "peak": 1e9}, {}):
        engine = build()
        engine.attach(Throughput(**options))  # type: ignore[arg-type]
        engine.run(data(2), max_epochs=1)
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_whole_name_alone(device: str, peak: float | None) -> None:
    assert peak_of(device) == peak


def test_two_of_them_have_metrics_by_their_names() -> None:
    engine, clock = build(), Clock()
    timed(engine, clock)
    engine.attach(Throughput(every="20it", clock=clock), Throughput(every="50it", clock=clock, name="slow"))
    found = measured(engine)
    assert [iteration for iteration, _ in found] == [20, 40, 50, 60, 80, 100]
    assert {*found[-1][1]} == {*RATES, *(f"slow/{name}" for name in RATES)}
    assert all(
        value == pytest.approx(3200) for _, values in found for name, value in values.items() if "samples" in name
    )


@pytest.mark.parametrize(("waiting", "calls"), [(False, 1), (True, 3)])
def test_between_two_measurements_an_iteration_calls_it_once_or_three_times(waiting: bool, calls: int) -> None:
    engine, called = build(), [0]

    def counted(signal: Signal, connection: Connection) -> Receiver:
        def call(engine: Engine) -> Any:
            called[0] += connection.owner == "throughput"
            return connection.call(engine)

        return call

    engine.attach(Throughput(every="1000it", waiting=waiting))
    engine.signals.call_through(counted)
    engine.run(data(30), max_epochs=1)
    assert called == [30 * calls + 1]  # and once as the run starts


@pytest.mark.moderate
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
        ({"tokens": 3.5}, "tokens=3.5"),
        ({"flops": "all"}, "flops='all'"),
        ({"flops": -1}, "flops=-1"),
        ({"peak": 1e12}, "peak= requires flops="),
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


@pytest.mark.moderate
def test_rates_are_those_of_all_processes_together() -> None:
    samples, mfu = assert_alike(run_together(together, 2))
    assert samples == pytest.approx(6400)
    assert mfu == pytest.approx(10 * 6400 / 1e6 / 2)


def test_what_torch_does_not_count_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def forward(engine: Engine, batch: Any) -> torch.Tensor:
        output: torch.Tensor = engine.modules["out"](engine.modules["lstm"](batch[0])[0][:, -1])
        return output

    model = {"lstm": nn.LSTM(3, 4, batch_first=True), "out": nn.Linear(4, 1)}
    update = Update(forward, lambda engine, output, batch: output.square().mean(), SGD)
    engine = Engine(update, model=model, seed=0)
    engine.attach(Throughput(every="5it", warmup=1, flops="count", peak=1e12))
    engine.run([(torch.ones(2, 5, 3),)] * 12, max_epochs=1, check=False)
    assert capsys.readouterr().err.count("does not count the operations of LSTM") == 1
