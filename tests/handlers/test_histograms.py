"""Histograms against NumPy's, of the weights and gradients of a plain loop."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from signalfire import Engine, Events, Phase
from signalfire.handlers import GradientAccumulation, GradientClipping, Histograms
from tests import kit
from tests.kit import build, mlp

batches = kit.batches


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.Tanh())


def logged(engine: Engine) -> dict[str, dict[int, list[float]]]:
    """Sum and sum of squares of each histogram, by tag and iteration."""
    found: dict[str, dict[int, list[float]]] = {}

    def receive(engine: Engine) -> None:
        entry = engine.log.entry
        assert entry is not None
        row = found.setdefault(entry.tag, {})
        assert engine.state.iteration not in row
        row[engine.state.iteration] = [entry.value.total, entry.value.squares]

    engine.connect(Events.HISTOGRAM_LOGGED, receive)
    return found


def sums(values: torch.Tensor) -> list[float]:
    exact = values.detach().double().numpy()
    return [float(exact.sum()), float((exact**2).sum())]


@pytest.mark.parametrize("window", [1, 3])
def test_the_weights_after_the_iteration_and_the_gradients_of_the_next_step_are_those_of_a_plain_loop(
    window: int,
) -> None:
    engine = build(network(), Histograms(every="2it"), GradientAccumulation(window), GradientClipping(0.1))
    found = logged(engine)
    engine.run(batches(6), max_epochs=1)

    torch.manual_seed(3)
    model = build(network()).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    due = False
    expected: dict[str, dict[int, list[float]]] = {}
    for iteration, (inputs, targets) in enumerate(batches(6), start=1):
        (nn.functional.mse_loss(model(inputs), targets) / window).backward()
        if iteration % window == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for name, parameter in model.named_parameters():
                if due:
                    expected.setdefault(f"gradients/{name}", {})[iteration] = sums(parameter.grad)
            due = False
            optimizer.step()
            optimizer.zero_grad()
        if iteration % 2 == 0:
            due = True
            for name, parameter in model.named_parameters():
                expected.setdefault(f"weights/{name}", {})[iteration] = sums(parameter)
    assert found.keys() == expected.keys()
    for tag, rows in expected.items():
        assert found[tag].keys() == rows.keys()
        for iteration, row in rows.items():
            assert np.allclose(found[tag][iteration], row, rtol=1e-6), (tag, iteration)


def test_between_the_intervals_nothing_is_called() -> None:
    handler = Histograms(every="5it")
    engine = build(network(), handler)
    logged(engine)
    calls: list[tuple[int, str]] = []

    def around(signal: Any, connection: Any) -> Any:
        def call(engine: Engine) -> None:
            if connection.owner == "histograms" or getattr(connection.receiver, "__self__", None) is handler:
                calls.append((engine.state.iteration, str(signal.event)))
            connection.call(engine)

        return call

    engine.connect(Events.STARTED, lambda engine: engine.signals.call_through(around), phase=Phase.PERSIST)
    engine.run(batches(12), max_epochs=1)
    inside = [one for one in calls if one[1] not in ("Events.STARTED", "Events.ENDED")]
    assert inside == [
        (5, "Events.ITERATION_COMPLETED"),
        (6, "Events.GRADIENTS_READY"),
        (10, "Events.ITERATION_COMPLETED"),
        (11, "Events.GRADIENTS_READY"),
    ]


@pytest.mark.moderate
def test_resumed_at_any_iteration_nothing_is_lost_or_doubled() -> None:
    saved: list[bytes] = []

    def save(engine: Engine) -> None:
        file = io.BytesIO()
        torch.save(engine.state_dict(), file)
        saved.append(file.getvalue())

    def engine_of() -> Engine:
        return build(network(), Histograms(every="3it"), GradientAccumulation(2))

    whole = engine_of()
    expected = logged(whole)
    whole.connect(Events.ITERATION_COMPLETED, save, phase=Phase.PERSIST)
    whole.run(batches(9), max_epochs=1)
    for moment, state in enumerate(saved[:-1], start=1):
        resumed = engine_of()
        found = logged(resumed)
        resumed.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        resumed.run(batches(9), max_epochs=1)
        rest = {tag: {i: row for i, row in rows.items() if i > moment} for tag, rows in expected.items()}
        assert found == {tag: rows for tag, rows in rest.items() if rows}, moment


def test_a_step_that_is_skipped_has_no_gradients_to_log() -> None:
    engine = build(network(), Histograms(every="2it", weights=False))
    found = logged(engine)
    engine.connect(Events.GRADIENTS_READY(once=3), lambda engine: engine.state.update.skip("a bad batch"))
    engine.run(batches(4), max_epochs=1)
    assert list(found["gradients/0.weight"]) == [4]


def test_a_run_that_is_called_again_logs_the_gradients_that_were_due() -> None:
    engine = build(network(), Histograms(every="3it", weights=False))
    found = logged(engine)
    engine.run(batches(6), max_iters=3)
    assert not found
    engine.run(batches(6), max_iters=6)
    assert list(found["gradients/0.weight"]) == [4]
    assert not engine.signal(Events.GRADIENTS_READY).receivers


def test_patterns_select_parameters_and_wrong_ones_are_named() -> None:
    engine = build(network(), Histograms(every="1it", parameters="*.bias", gradients=False))
    found = logged(engine)
    engine.run(batches(2), max_epochs=1)
    assert list(found) == ["weights/0.bias", "weights/2.bias"]
    engine = build(network(), Histograms(every="1it", parameters="*.bia"))
    with pytest.raises(ValueError, match=r"'histograms': parameters='\*.bia' matches no parameter"):
        engine.run(batches(2), max_epochs=1)
    with pytest.raises(ValueError, match="nothing would be logged"):
        Histograms(weights=False, gradients=False)


def test_gradients_of_strange_kinds_have_a_row_or_a_warning_with_their_name() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4, sparse=True)
            self.empty = nn.Parameter(torch.zeros(0))
            self.complex = nn.Parameter(torch.ones(4, dtype=torch.complex64))
            self.coarse = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            rows = self.table(inputs.abs().long().clamp(max=6)).mean(1) * self.coarse.float() * self.complex.abs()
            total: torch.Tensor = rows.sum(-1, keepdim=True) + self.empty.sum()
            return total

    engine = build(Strange(), Histograms(every="1it"))
    found = logged(engine)
    with pytest.warns(UserWarning, match="empty.*there are no values"):
        engine.run(batches(2), max_epochs=1)
    names = {"table.weight", "complex", "coarse"}
    assert found.keys() == {f"{kind}/{name}" for kind in ("weights", "gradients") for name in names}


def test_the_training_is_not_changed() -> None:
    digests = []
    for handlers in ([], [Histograms(every="1it")]):
        engine = build(network(), *handlers)
        logged(engine)
        engine.run(batches(4), max_epochs=2)
        digests.append((kit.digest(engine.model.state_dict()), torch.get_rng_state().sum().item()))
    assert digests[0] == digests[1]
