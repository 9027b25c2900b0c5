"""What newcomers get wrong, and the errors that they see."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Update, on
from signalfire.handlers import Accuracy, CSVLogger, Metrics
from tests import kit
from tests.kit import linear


def build() -> Engine:
    return kit.build(linear(3, 1, seed=0))


@dataclass
class Fields:
    x: Tensor


class Slots:
    __slots__ = ("x",)


@pytest.mark.parametrize(
    ("batch", "described"),
    [
        ({"x": torch.ones(2, 3)}, "a dict with 'x'"),
        (torch.ones(2, 3), r"a tensor of shape \(2, 3\)"),
        (Fields(torch.ones(2, 3)), "a Fields with 'x'"),
        (SimpleNamespace(x=torch.ones(2, 3)), "a SimpleNamespace with 'x'"),
        (Slots(), "a Slots"),
        (5, "a int"),
    ],
    ids=["dict", "tensor", "data class", "namespace", "slots", "number"],
)
def test_batches_that_are_no_pairs(batch: Any, described: str) -> None:
    message = rf"each batch to be \(input, target\), but this batch is {described}; .*input='image', target='label'"
    with pytest.raises(TypeError, match=message):
        Engine(Update.supervised(torch.nn.functional.mse_loss, kit.SGD), linear(3, 1, seed=0)).run(
            [batch], max_epochs=1
        )
    if isinstance(batch, Tensor):
        return  # which a prediction takes as its input
    message = (
        rf"each batch to be a tensor or \(input, ...\), but this batch is {described}; .*prediction\(input='image'\)"
    )
    with pytest.raises(TypeError, match=message):
        Engine(Update.prediction(), linear(3, 1, seed=0)).run([batch])


@dataclass
class Pair:
    x: Tensor
    y: Tensor

    def __getitem__(self, place: int) -> Tensor:
        return (self.x, self.y)[place]


def test_a_data_class_that_is_indexed_like_a_pair_is_one() -> None:
    pairs = kit.batches(2, inputs=3)
    engine, other = build(), build()
    engine.run([Pair(x, y) for x, y in pairs], max_epochs=1)
    other.run(pairs, max_epochs=1)
    kit.assert_same(engine.model, other.model)


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
        AttributeError,
        match=r"Misspelt.act is declared with @on\('evry'\), but the handler has no attribute 'evry'",
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
        AttributeError, match=r"Held\.engine cannot be set, because it is the engine that the handler is attached to"
    ):
        Held(build())


def test_a_path_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"CSVLogger\(path=3\): expected the path of a file"):
        CSVLogger(3)  # type: ignore[arg-type]
