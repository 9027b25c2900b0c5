"""Functions that load or change weights beside the engine."""

from __future__ import annotations

import pytest
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
    with pytest.warns(FindingWarning, match=r"W68: .*\(announce or forget\) changes the weights"):
        engine.run(batches(2), max_epochs=2)
