"""Functions that load or change weights beside the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from signalfire import Engine, Events, FindingWarning
from signalfire.handlers import Pruning
from tests.kit import batches, build, linear, mlp


def announce(engine: Engine) -> None:
    engine.state.metrics["runs"] = 1.0


def forget(engine: Engine) -> None:
    nn.init.zeros_(engine.model.bias)


def test_of_several_functions_the_one_that_changes_the_weights_is_named() -> None:
    engine = build(linear(5, 1))
    engine.connect(Events.STARTED, announce)
    engine.connect(Events.STARTED, forget)
    engine.run(batches(2), max_epochs=1)
    with pytest.warns(FindingWarning, match=r"W68: .*\(forget\) overwrites the trained weights"):
        engine.run(batches(2), max_epochs=2)


def keep_in_bounds(engine: Engine) -> None:
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.clamp_(-10.0, 10.0)


def test_a_function_that_leaves_the_values_as_they_are_changes_nothing() -> None:
    engine = build(linear(5, 1))
    engine.connect(Events.STARTED, keep_in_bounds)
    engine.run(batches(2), max_epochs=1)
    engine.run(batches(2), max_epochs=2)
    assert not engine.findings.of_run().of("W68")


def test_a_handler_may_change_weights_beside_a_function_at_the_start() -> None:
    engine = build(linear(5, 1))
    engine.connect(Events.STARTED, announce)
    engine.run(batches(2), max_epochs=1)
    engine.attach(Pruning(0.5))
    engine.run(batches(2), max_epochs=2)


def add_a_class(engine: Engine) -> None:
    old = engine.model[-1]
    engine.model[-1] = nn.Linear(64, old.out_features + 1)
    with torch.no_grad():
        engine.model[-1].weight[:-1] = old.weight


def keep_at_unit_length(engine: Engine) -> None:
    with torch.no_grad():
        engine.model[0].weight.div_(engine.model[0].weight.norm(dim=1, keepdim=True))


@pytest.mark.parametrize(
    ("function", "event"), [(add_a_class, None), (keep_at_unit_length, Events.OPTIMIZER_STEP_COMPLETED)]
)
def test_new_layers_and_rounding_overwrite_no_trained_weights(function: Any, event: Any) -> None:
    engine = build(mlp(5, 64, 1), allow=["W11", "C07", "C08"], loss=lambda output, target: output.square().mean())
    engine.connect(Events.STARTED, function)
    if event is not None:
        engine.connect(event, function)
    for epochs in (1, 2):
        engine.run(batches(2), max_epochs=epochs)
    assert not engine.findings.of_run().of("W68")


def move_halfway(engine: Engine) -> None:
    own = engine.model.state_dict()
    for name, _ in engine.model.named_parameters():
        own[name].mul_(0.5)
    engine.model.load_state_dict(own)


def restore_statistics(engine: Engine) -> None:
    statistics = {name: one.clone() for name, one in engine.model.named_buffers()}
    engine.model.load_state_dict({**engine.model.state_dict(), **statistics})


@pytest.mark.parametrize("function", [move_halfway, restore_statistics])
def test_a_state_that_is_loaded_as_soon_as_it_is_taken_is_fine(function: Any) -> None:
    engine = build(mlp(5, 8, 1, nn.BatchNorm1d(8)))
    engine.connect(Events.EPOCH_COMPLETED, function)
    engine.run(batches(2), max_epochs=2)
    assert not engine.findings.of_run()
    assert not engine.model._state_dict_hooks


def test_a_state_of_an_earlier_iteration_is_not_that_of_its_time() -> None:
    engine, kept = build(linear(5, 1)), {}

    def keep(engine: Engine) -> None:
        if engine.state.epoch == 1:
            kept.update(engine.model.state_dict())
        else:
            engine.model.state_dict()
            engine.model.load_state_dict(kept)

    engine.connect(Events.EPOCH_COMPLETED, keep)
    with pytest.warns(FindingWarning, match="W67"):
        engine.run(batches(2), max_epochs=2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_which_refuses_hooks_is_looked_at_all_the_same() -> None:
    engine = build(torch.jit.script(linear(5, 1)))
    engine.run(batches(), max_epochs=1)
    assert not engine.findings.of_run().of("W09")
