"""Where the time of a run goes is reported, and reporting it changes nothing."""

from __future__ import annotations

import io
import json
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.handlers import (
    Average,
    GradientClipping,
    Metrics,
    MicroBatching,
    Profiler,
    SharpnessAwareMinimization,
    Validation,
)

WAIT = 0.004


class Slow(nn.Module):
    """Takes 4 ms for the forward and 8 ms for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(WAIT)
        out: Tensor = Sleeping.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return out


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * WAIT)
        return gradient


class Waiting:
    """Data that keeps one waiting for 12 ms."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.batches):
            time.sleep(3 * WAIT)
            x = torch.randn(4, 3, generator=generator)
            yield x, x.sum(1, keepdim=True)


class Dawdling(Handler):
    @on(Events.ITERATION_COMPLETED(every=2), phase=Phase.RECORD)
    def dawdle(self, engine: Engine) -> None:
        time.sleep(4 * WAIT)


def make(*handlers: Handler, model: nn.Module | None = None) -> Engine:
    torch.manual_seed(0)
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
    engine = Engine(update, model=model or nn.Linear(3, 1), seed=0)
    engine.attach(*handlers)
    return engine


def data(batches: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batches, 4, 3, generator=generator)
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def by_name(profiler: Profiler) -> dict[str, Any]:
    return {f"{one.name} {one.event}".strip(): one for one in profiler.timings}


def test_what_waits_where_is_found_where_it_waits() -> None:
    profiler = Profiler(file=io.StringIO())
    engine = make(profiler, Dawdling(), GradientClipping(max_norm=1.0), model=Slow())

    @engine.on(Events.LOSS_COMPUTED)
    def mine(engine: Engine) -> None:
        time.sleep(WAIT)

    engine.run(Waiting(6), max_epochs=1)
    found = by_name(profiler)
    least = {
        "waiting for data": (6, 3 * WAIT),
        "forward": (6, WAIT),
        "backward": (6, 2 * WAIT),
        "loss": (6, 0),
        "optimizer step": (6, 0),
        "dawdling.dawdle ITERATION_COMPLETED": (3, 4 * WAIT),
        "mine LOSS_COMPUTED": (6, WAIT),
        "gradient_clipping.clip GRADIENTS_READY": (6, 0),
    }
    assert {name: one.calls for name, one in found.items()} == {name: calls for name, (calls, _) in least.items()}
    for name, (calls, wait) in least.items():
        assert found[name].seconds >= calls * wait
        assert found[name].seconds / calls <= found[name].longest <= found[name].seconds
    assert profiler.iterations == 6
    assert sum(one.seconds for one in profiler.timings) <= profiler.seconds


def test_the_order_is_that_of_the_loop_and_then_by_what_takes_longest() -> None:
    profiler = Profiler(file=io.StringIO())
    make(profiler, Dawdling(), GradientClipping(max_norm=1.0)).run(data(), max_epochs=1)
    acts = ["waiting for data", "forward", "loss", "backward", "optimizer step"]
    assert [one.name for one in profiler.timings] == [*acts, "dawdling.dawdle", "gradient_clipping.clip"]


def test_the_table_is_printed_when_the_run_ends() -> None:
    reported = io.StringIO()
    make(Profiler(file=reported), GradientClipping(max_norm=1.0)).run(data(), max_epochs=2)
    title, header, *rows = reported.getvalue().splitlines()
    assert title.startswith("12 iterations in ")
    assert header.split() == ["event", "calls", "seconds", "us", "per", "call", "longest", "%"]
    assert rows[-1].startswith("the rest")
    clip = next(row for row in rows if row.startswith("gradient_clipping.clip"))
    assert clip.split()[1:3] == ["GRADIENTS_READY", "12"]
    assert sum(float(row.split()[-1]) for row in rows) == pytest.approx(100, abs=0.5)


def test_weights_are_those_of_a_run_without_it_and_nothing_of_it_stays() -> None:
    weights = []
    for handlers in ([], [Profiler(file=io.StringIO())]):
        engine = make(*handlers, GradientClipping(max_norm=0.1), Metrics(loss=Average()))
        engine.run(data(), max_epochs=2)
        weights.append(engine.modules["model"].state_dict()["weight"].clone())
        for signal in engine.signals.all():
            assert signal.around is None
    assert torch.equal(*weights)


def test_filters_and_receivers_that_join_later_are_measured_alike() -> None:
    profiler = Profiler(file=io.StringIO())
    engine = make(profiler)
    seen: list[int] = []

    def rarely(engine: Engine) -> None:
        seen.append(engine.state.iteration)

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def join(engine: Engine) -> None:
        engine.connect(Events.ITERATION_COMPLETED(every=3), rarely)

    engine.run(data(9), max_epochs=1)
    assert seen == [3, 6, 9]
    assert by_name(profiler)["rarely ITERATION_COMPLETED"].calls == 3


def test_an_error_is_still_reported_by_its_receiver_and_the_table_comes_all_the_same() -> None:
    reported = io.StringIO()
    profiler = Profiler(file=reported)
    engine = make(profiler)

    @engine.on(Events.BACKWARD_COMPLETED(once=3))
    def fail(engine: Engine) -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more") as raised:
        engine.run(data(), max_epochs=1)
    assert any("raised by fail at Events.BACKWARD_COMPLETED" in note for note in raised.value.__notes__)
    assert reported.getvalue().startswith("2 iterations in ")
    assert by_name(profiler)["fail BACKWARD_COMPLETED"].calls == 1


def test_what_is_computed_again_belongs_to_the_step() -> None:
    profiler = Profiler(file=io.StringIO())
    make(profiler, SharpnessAwareMinimization(0.1), model=Slow()).run(data(3), max_epochs=1)
    found = by_name(profiler)
    assert found["forward"].calls == found["backward"].calls == found["optimizer step"].calls == 3
    assert found["optimizer step"].seconds >= 3 * 3 * WAIT  # the second forward and backward


def test_pieces_of_a_batch_count_one_by_one() -> None:
    profiler = Profiler(file=io.StringIO())
    make(profiler, MicroBatching(2)).run(data(3), max_epochs=1)
    assert by_name(profiler)["forward"].calls == 6


def test_a_validation_is_its_handlers_time() -> None:
    model = Slow()
    profiler = Profiler(file=io.StringIO())
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    evaluator.attach(Metrics(loss=Average(nn.functional.mse_loss)))
    make(profiler, Validation(evaluator, data(4)), model=model).run(data(2), max_epochs=1)
    found = by_name(profiler)
    assert found["forward"].calls == 2
    assert found["validation.validate EPOCH_COMPLETED"].seconds >= 4 * WAIT


def test_a_second_run_begins_anew() -> None:
    profiler = Profiler(file=io.StringIO())
    engine = make(profiler)
    engine.run(data(4), max_epochs=1)
    engine.run(data(4), max_epochs=3)
    assert profiler.iterations == 8
    assert by_name(profiler)["forward"].calls == 8


def test_the_trace_has_the_iterations_that_were_asked_for(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "profile", trace_after=2, trace_iterations=3)
    make(profiler, GradientClipping(max_norm=1.0), model=Slow()).run(data(8), max_epochs=1)
    assert (tmp_path / "profile" / "profile.txt").read_text() == profiler.table() + "\n"
    trace = json.loads((tmp_path / "profile" / "trace.json").read_text())
    events = trace["traceEvents"]
    assert [one["name"] for one in events].count("forward") == 3
    for one in events:
        assert one["ph"] == "X"
        if one["name"] == "forward":
            assert 1e6 * WAIT <= one["dur"] < 1e8
    spans = sorted((one["ts"], one["ts"] + one["dur"]) for one in events)
    assert all(ended <= begins + 0.5 for (_, ended), (begins, _) in pairwise(spans)), "one by one"
    clips = [one for one in events if one["name"] == "gradient_clipping.clip"]
    assert [one["args"]["event"] for one in clips] == ["GRADIENTS_READY"] * 3


def test_a_run_that_ends_within_the_trace_leaves_what_there_was(tmp_path: Path) -> None:
    make(Profiler(tmp_path, trace_after=1, trace_iterations=100)).run(data(3), max_epochs=1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [one["name"] for one in events].count("forward") == 2


def test_torchs_profiler_has_the_operators_within_the_acts(tmp_path: Path) -> None:
    make(Profiler(tmp_path, trace_after=1, trace_iterations=2, torch_profiler=True)).run(data(5), max_epochs=1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [one.get("name") for one in events]
    assert names.count("forward") == 2
    assert names.count("aten::addmm") >= 2
    (first, *_) = (one for one in events if one.get("name") == "forward")
    operator = next(one for one in events if one.get("name") == "aten::addmm")
    assert first["ts"] <= operator["ts"] <= operator["ts"] + operator["dur"] <= first["ts"] + first["dur"]
    assert "aten::addmm" in (tmp_path / "operators.txt").read_text()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Profiler\(torch_profiler=True\): the trace needs a folder"):
        Profiler(torch_profiler=True)
    with pytest.raises((TypeError, ValueError), match="trace_iterations=0"):
        Profiler(trace_iterations=0)
    with pytest.raises((TypeError, ValueError), match="trace_after=-1"):
        Profiler(trace_after=-1)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="exists but is not a folder"):
        Profiler(tmp_path / "file")
    engine = make(Profiler(file=io.StringIO()))
    with pytest.raises(ValueError, match="both 'profiler' and 'second' control how receivers are called"):
        engine.attach(Profiler(file=io.StringIO(), name="second"))
