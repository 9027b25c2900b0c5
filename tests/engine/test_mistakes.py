"""What newcomers get wrong, and the errors that they see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from signalfire import Engine, Events, Handler, Update, on
from signalfire.handlers import Accuracy, CSVLogger, GradientAccumulation, History, Metrics
from signalfire.testing import check_handler
from tests import kit
from tests.kit import linear

DATA = [(torch.ones(2, 3), torch.ones(2, 1))] * 3


def build() -> Engine:
    return kit.build(linear(3, 1, seed=0))


@pytest.mark.parametrize("batch", [{"x": torch.ones(2, 3)}, torch.ones(2, 3)], ids=["dict", "Tensor"])
def test_batches_that_are_no_pairs(batch: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"batches of \(input, target\), but this one is a {type(batch).__name__}.*forward"
    ):
        build().run([batch], max_epochs=1)


def test_a_weight_for_each_sample() -> None:
    engine = build()
    engine.attach(GradientAccumulation(2, weight=lambda engine: torch.ones(2)))
    with pytest.raises(RuntimeError) as caught:
        engine.run(DATA, max_epochs=1)
    assert any("weight of update 'main' has shape (2,); set one number" in note for note in caught.value.__notes__)


def test_a_time_without_a_unit() -> None:
    with pytest.raises(TypeError, match=r"run\(max_time=5\): 5 is not an interval"):
        build().run(DATA, max_time=5)  # type: ignore[arg-type]


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


def test_checks_of_what_cannot_be_checked() -> None:
    with pytest.raises(TypeError, match="expected a function that makes a new handler on each call"):
        check_handler(build, History(), DATA, max_epochs=2)  # type: ignore[arg-type]

    def unseeded() -> Engine:
        return Engine(Update.supervised(nn.functional.mse_loss, torch.optim.SGD), model=nn.Linear(3, 1), seed=0)

    with pytest.raises(AssertionError, match="build\\(\\) or the data differ on each call"):
        check_handler(unseeded, History, DATA, max_epochs=2)


def test_a_path_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"CSVLogger\(path=3\): expected the path of a file"):
        CSVLogger(3)  # type: ignore[arg-type]
