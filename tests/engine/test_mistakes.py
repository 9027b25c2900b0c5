"""What newcomers get wrong, and the errors that they see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from signalfire import Engine, Events, Handler, on
from signalfire.handlers import Accuracy, CSVLogger, Metrics
from tests import kit
from tests.kit import linear


def build() -> Engine:
    return kit.build(linear(3, 1, seed=0))


@pytest.mark.parametrize("batch", [{"x": torch.ones(2, 3)}, torch.ones(2, 3)], ids=["dict", "Tensor"])
def test_batches_that_are_no_pairs(batch: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"batches of \(input, target\), but this one is a {type(batch).__name__}.*forward"
    ):
        build().run([batch], max_epochs=1)


def test_a_metric_without_a_name() -> None:
    with pytest.raises(TypeError, match=r"Metrics\(accuracy=Accuracy\(\)\)"):
        Metrics(Accuracy())  # type: ignore[arg-type]


def test_an_interval_in_an_attribute_that_is_not_there() -> None:
    class Misspelt(Handler):
        every = Events.EPOCH_COMPLETED

        @on("evry")
        def act(self, engine: Engine) -> None:
            pass

    with pytest.raises(
        AttributeError, match=r"Misspelt.act is declared with @on\('evry'\), but the handler has no such"
    ):
        build().attach(Misspelt())


def test_attributes_that_every_handler_has() -> None:
    class Named(Handler):
        def __init__(self) -> None:
            self.name = "mine"

    class Held(Handler):
        def __init__(self, engine: Engine) -> None:
            self.engine = engine

    with pytest.raises(AttributeError, match=r"super\(\).__init__\(name='mine'\)"):
        Named()
    with pytest.raises(
        AttributeError, match=r"Held\.engine cannot be set: it is the engine that the handler is attached to"
    ):
        Held(build())


def test_a_path_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"CSVLogger\(path=3\): expected the path of a file"):
        CSVLogger(3)  # type: ignore[arg-type]
