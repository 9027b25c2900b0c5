"""Functions that load or change weights beside the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from signalfire import Engine, Events, FindingWarning
from tests.kit import batches, build, linear


def announce(engine: Engine) -> None:
    engine.state.metrics["runs"] = 1.0


def forget(engine: Engine) -> None:
    nn.init.zeros_(engine.model.bias)


def test_of_several_functions_none_is_said_to_be_the_one_that_changes_the_weights() -> None:
    engine = build(linear(5, 1))
    engine.connect(Events.STARTED, announce)
    engine.connect(Events.STARTED, forget)
    engine.run(batches(2), max_epochs=1)
    with pytest.warns(FindingWarning, match=r"W68: .*\(announce or forget\) overwrites the trained weights"):
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
