"""Summary against what torch itself counts, and against formulas."""

from __future__ import annotations

import contextlib
import io
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from signalfire import Engine, Events, Update
from signalfire.handlers import FullyShardedDataParallel, ModelSummary, Summary, summary
from tests import kit
from tests.processes import assert_alike, run_together

ADAM = partial(torch.optim.Adam, lr=0.01)


class Odd(nn.Module):
    """Outputs of several kinds, a layer that is used twice, one that is not, a buffer, and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.twice = nn.Linear(8, 8)
        self.unused = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.structured = Structured()
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        found = self.structured(self.twice(self.twice(hidden)).mean(1))
        scores: Tensor = self.head(self.norm(found["kept"]))
        return scores


class Structured(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"kept": x, "pair": (x.sum(), None)}


TOKENS = [(torch.arange(24).reshape(4, 6) % 20, torch.arange(4))] * 3


def trained(model: nn.Module, data: Any, **options: Any) -> tuple[ModelSummary, str, Engine]:
    engine = Engine(Update.supervised(nn.functional.cross_entropy, ADAM), model=model, seed=0)
    handler = Summary(file=io.StringIO(), **options)
    engine.attach(handler)
    engine.run(data, max_epochs=2)
    assert handler.summary is not None
    assert isinstance(handler.file, io.StringIO)
    return handler.summary, handler.file.getvalue(), engine


def row(found: ModelSummary, name: str) -> Any:
    return next(one for one in found.rows if one.name == name)


def test_the_totals_are_what_torch_holds_with_shared_parameters_counted_once() -> None:
    model = Odd()
    found = summary(model)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.trainable == found.parameters - 12
    assert found.weight_bytes == 4 * found.parameters
    assert found.gradient_bytes == 4 * found.trainable
    assert found.buffer_bytes == 4 * 16 + 8
    for name, module in model.named_modules():
        assert row(found, f"model.{name}".rstrip(".")).parameters == sum(p.numel() for p in module.parameters())
    assert {one.name: one.shared for one in found.rows if one.shared} == {"model.head": 160}


def test_a_module_under_two_names_is_shown_twice_and_counted_once() -> None:
    layer = nn.Linear(4, 4)
    found = summary(nn.Sequential(layer, nn.ReLU(), layer))
    assert (found.parameters, [one.shared for one in found.rows]) == (20, [0, 0, 0, 20])


def test_complex_and_lazy_parameters() -> None:
    complex_ = nn.Linear(4, 4, dtype=torch.complex64)
    assert (summary(complex_).parameters, summary(complex_).weight_bytes) == (20, 160)
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    before = summary(lazy)
    assert (before.parameters, [one.parameters for one in before.rows]) == (None, [None, None, 0, 10])
    assert "?" in before.table().splitlines()[2]
    lazy(torch.zeros(1, 3))
    assert summary(lazy).parameters == 4 * 3 + 4 + 10


def test_shapes_and_calls_are_those_of_the_first_forward() -> None:
    found, printed, engine = trained(Odd(), TOKENS)
    shown = {one.name.removeprefix("model."): (one.output, one.calls) for one in found.rows}
    assert shown == {
        "model": ("4x20", 1),
        "embedding": ("4x6x8", 1),
        "recurrent": ("(4x6x8, (1x4x8, 1x4x8))", 1),
        "twice": ("4x6x8", 2),
        "unused": ("", 0),
        "norm": ("4x8", 1),
        "structured": ("{kept: 4x8, pair: (scalar, None)}", 1),
        "head": ("4x20", 1),
    }
    assert found.uncounted == {"LSTM": 1}
    assert "not included: 1 LSTM" in printed
    (optimizer,) = (update.optimizer for update in engine.updates)
    assert optimizer is not None
    kept = [one for state in optimizer.state.values() for one in state.values()]
    assert found.optimizer_bytes == sum(one.numel() * one.element_size() for one in kept)
    assert printed.count("parameters:") == 1, "a second epoch prints nothing"


def test_operations_are_the_formulas_and_what_torch_counts() -> None:
    model = kit.mlp(5, 8, 3, nn.Tanh())
    found, _, _ = trained(model, [(torch.randn(7, 5), torch.zeros(7, dtype=torch.long))] * 3)
    assert row(found, "model.0").flops == 2 * 7 * 5 * 8
    assert row(found, "model.2").flops == 2 * 7 * 8 * 3
    assert found.flops == row(found, "model").flops == 2 * 7 * (5 * 8 + 8 * 3)
    assert found.samples == 7
    network = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 6, 3, stride=2), nn.Flatten(), nn.LazyLinear(3))
    inputs = torch.randn(7, 2, 11)
    network(inputs)
    with FlopCounterMode(display=False) as counter:
        network(inputs)
    found, _, _ = trained(network, [(inputs, torch.zeros(7, dtype=torch.long))] * 3)
    assert found.flops == counter.get_total_flops()


def test_attention_is_counted_on_the_cpu() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3))
    found, _, _ = trained(model, [(torch.randn(2, 5, 8), torch.zeros(2, dtype=torch.long))] * 3)
    products = 4 * 8 * 8 + 2 * 8 * 16  # the four projections of attention, and the two of the feed-forward part
    assert row(found, "model.0").flops == 2 * 2 * 5 * products + 2 * (2 * 2 * 5 * 5 * 8)


class Retrying(nn.Module):
    """Its second module fails, which it catches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(TypeError):
            self.second(None)
        scores: Tensor = self.first(x) + 0 * self.second(x)
        return scores


def test_operations_after_an_error_that_the_model_catches_belong_to_their_own_module() -> None:
    model, data = Retrying(), [(torch.randn(7, 5), torch.zeros(7, dtype=torch.long))] * 3
    model.second(torch.zeros(1, 5))
    found, _, _ = trained(model, data)
    assert [one.flops for one in found.rows] == [420, 210, 210]


def test_a_second_run_prints_no_second_summary() -> None:
    _, printed, engine = trained(Odd(), TOKENS)
    engine.run(TOKENS, max_epochs=3)
    handler = engine.find(Summary)
    assert isinstance(handler.file, io.StringIO)
    assert handler.file.getvalue() == printed
    assert handler.summary is not None


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_of_it_stays_also_after_an_error_in_the_forward(failing: bool) -> None:
    model = Odd()
    engine = Engine(Update.supervised(nn.functional.cross_entropy, ADAM), model=model, seed=0)
    engine.attach(Summary(file=io.StringIO()))
    hooks: list[int] = []

    def count(engine: Engine) -> None:
        hooks.append(sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()))

    if failing:
        model.head.register_forward_hook(lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.run(TOKENS, max_epochs=1)
        model.head._forward_hooks.clear()
    else:
        engine.connect(Events.BACKWARD_STARTED, count)
        engine.run(TOKENS, max_epochs=1)
        assert hooks == [0, 0, 0]
    count(engine)
    assert hooks[-1] == 0
    assert not engine.signal(Events.FORWARD_STARTED).connections


def test_rows_are_chosen_by_depth_and_by_pattern() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2))
    data = [(torch.randn(2, 4), torch.zeros(2, dtype=torch.long))] * 3
    _, printed, _ = trained(model, data, depth=1)
    assert [line.split()[0] for line in printed.splitlines()[2:5]] == ["model", "0", "1"]
    _, printed, _ = trained(model, data, depth=None, modules="*.0.*")
    assert [line.split()[0] for line in printed.splitlines()[2:4]] == ["model.0.0", "model.0.1"]
    assert printed.splitlines()[4].startswith("parameters: 58")


def test_of_a_compiled_model_only_parameters_are_shown() -> None:
    model = kit.mlp(5, 8, 3, nn.Tanh())
    model.compile(backend="eager")
    found, printed, _ = trained(model, [(torch.randn(7, 5), torch.zeros(7, dtype=torch.long))] * 3)
    torch.compiler.reset()
    assert (found.parameters, found.flops) == (75, None)
    assert "MFLOPs" not in printed


def test_in_a_notebook_it_is_the_same_table() -> None:
    assert summary(nn.Linear(2, 2))._repr_html_() == f"<pre>{summary(nn.Linear(2, 2))}</pre>"


@pytest.mark.parametrize("wrong", [{"depth": -1}, {"depth": "2"}, {"modules": 3}, {"file": "summary.txt"}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"Summary.*{next(iter(wrong))}="):
        Summary(**wrong)
    with pytest.raises(TypeError, match=r"summary\(\[1, 2\]\): expected a torch.nn.Module, or a mapping"):
        summary([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"summary\(\): 'model' is a int"):
        summary({"model": 3})  # type: ignore[dict-item]


@pytest.mark.slow
def test_what_a_module_takes_does_not_grow_with_their_number() -> None:
    calls = []
    for number in (100, 1000):
        model, counts = nn.Sequential(*(nn.Linear(4, 4) for _ in range(number))), [0]

        def count(frame: Any, event: str, argument: Any, counts: list[int] = counts) -> None:
            counts[0] += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            summary(model)
        finally:
            sys.setprofile(None)
        calls.append(counts[0] / number)
    assert calls[1] <= calls[0]
    assert calls[1] < 200


def sharded() -> Any:
    engine = Engine(Update.supervised(nn.functional.cross_entropy, ADAM), model=kit.mlp(5, 8, 3, nn.Tanh()), seed=0)
    handler = Summary(file=io.StringIO())
    engine.attach(FullyShardedDataParallel(timeout=60.0), handler)
    engine.run([(torch.randn(7, 5), torch.zeros(7, dtype=torch.long))] * 4, max_epochs=1)
    return engine.processes.broadcast(
        handler.summary
        and (handler.summary.parameters, handler.summary.weight_bytes, [one.parameters for one in handler.summary.rows])
    )


@pytest.mark.slow
def test_of_a_sharded_model_all_parameters_are_counted() -> None:
    assert assert_alike(run_together(sharded, 2)) == (75, 300, [75, 48, 0, 27])
