"""Functions that call the model between the iterations."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from signalfire import Engine, Events, FindingWarning
from tests.kit import batches, build, mlp


def evaluate(engine: Engine) -> None:
    with torch.no_grad():
        engine.model(batches(1)[0][0])


def built(**options: Any) -> Engine:
    return build(mlp(5, 8, 1, nn.BatchNorm1d(8)), **options)


@pytest.mark.parametrize(
    "event",
    [Events.EPOCH_COMPLETED, Events.EPOCH_STARTED, Events.ITERATION_COMPLETED(every=4), Events.ITERATION_COMPLETED],
    ids=str,
)
def test_the_first_call_is_looked_at_and_leaves_no_trace(event: Any) -> None:
    engine = built()
    engine.connect(event, evaluate)
    with pytest.warns(
        match="W91: evaluate at .* calls the model without gradients, .* '1' behaves differently"
    ) as caught:
        engine.run(batches(5), max_epochs=3)
    assert len(caught) == 1
    assert not engine.model._forward_pre_hooks


def test_a_filter_is_called_as_often_as_without_the_look() -> None:
    engine = built(allow=["W91"])
    calls: list[int] = []
    engine.connect(Events.ITERATION_COMPLETED(every=4), lambda engine: calls.append(engine.state.iteration))
    chosen = Events.ITERATION_COMPLETED(when=lambda engine: engine.state.iteration in (2, 7))
    engine.connect(chosen, lambda engine: calls.append(-1))
    engine.run(batches(5), max_epochs=2)
    assert calls == [-1, 4, -1, 8]


def in_eval_mode(engine: Engine) -> None:
    engine.model.eval()
    evaluate(engine)
    engine.model.train()


def with_gradients(engine: Engine) -> None:
    engine.model(batches(1)[0][0])


def new_statistics(engine: Engine) -> None:
    update_bn([inputs for inputs, _ in batches(2)], engine.model)


def precise_statistics(engine: Engine) -> None:
    engine.model.train()
    with torch.no_grad():
        for inputs, _ in batches(2):
            engine.model(inputs)


def fresh_statistics(engine: Engine) -> None:
    engine.model[1].reset_running_stats()
    with torch.no_grad():
        for inputs, _ in batches(2):
            engine.model(inputs)


@pytest.mark.parametrize(
    "function", [in_eval_mode, with_gradients, new_statistics, precise_statistics, fresh_statistics]
)
def test_other_calls_stay_silent(function: Any) -> None:
    engine = built()
    engine.connect(Events.EPOCH_COMPLETED, function)
    engine.run(batches(5), max_epochs=2)


def test_a_model_that_does_the_same_in_both_modes_needs_none() -> None:
    engine = build(mlp(5, 8, 1))
    engine.connect(Events.EPOCH_COMPLETED, evaluate)
    engine.run(batches(5), max_epochs=2)


class Features(nn.Module):
    """Its features are computed without the dropout of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor, features: bool = False) -> torch.Tensor:
        found: torch.Tensor = self.body(inputs)
        return found if features else self.head(found)


@pytest.mark.parametrize("features", [True, False])
def test_a_part_that_a_function_does_not_call_behaves_no_differently(features: bool) -> None:
    engine = build(Features())

    def look(engine: Engine) -> None:
        with torch.no_grad():
            engine.model(batches(1)[0][0], features=features)

    engine.connect(Events.EPOCH_COMPLETED, look)
    with nullcontext() if features else pytest.warns(FindingWarning, match=r"W91: .* 'head.0' behaves differently"):
        engine.run(batches(2), max_epochs=1)
    assert not engine.model.head[0]._forward_pre_hooks


def test_what_a_function_raises_passes_and_the_hook_is_gone() -> None:
    engine = built()

    def fail(engine: Engine) -> None:
        raise KeyError("meant")

    engine.connect(Events.EPOCH_COMPLETED, fail)
    with pytest.raises(KeyError, match="meant"):
        engine.run(batches(2), max_epochs=1)
    assert not engine.model._forward_pre_hooks


def evaluate_all(engine: Engine) -> None:
    with torch.no_grad():
        for inputs, _ in batches(2):
            engine.model(inputs)


@pytest.mark.parametrize(("function", "reported"), [(evaluate, False), (evaluate_all, True)])
def test_one_forward_before_the_training_makes_lazy_layers_or_shows_shapes(function: Any, reported: bool) -> None:
    engine = built()
    engine.connect(Events.STARTED, function)
    with pytest.warns(FindingWarning, match="W91") if reported else nullcontext():
        engine.run(batches(2), max_epochs=1)
