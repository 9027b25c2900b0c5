"""Which class of targets a loss ignores, if your function or module calls one of torch's losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Update
from signalfire.handlers import Accuracy, Average, Metrics
from signalfire.handlers._common.ignored import ignored_class

PADDING = 3
TOKENIZER = SimpleNamespace(tokens=SimpleNamespace(padding=4))
CRITERION = nn.CrossEntropyLoss(ignore_index=5)


def with_global(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="mean")


def with_attributes(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="mean", ignore_index=TOKENIZER.tokens.padding)


def with_module(output: Tensor, target: Tensor) -> Tensor:
    return CRITERION(output.flatten(0, 1), target.flatten())  # type: ignore[no-any-return]


def with_default(output: Tensor, target: Tensor, padding: int = 6) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=padding)


def with_function(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"loss": with_default(output, target) + output.square().mean()}


def closing_over(padding: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: F.nll_loss(output, target, ignore_index=padding)


class OwnLoss(nn.Module):
    def __init__(self, padding: int) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=self.padding, label_smoothing=0.1)


class Task:
    def __init__(self, padding: int) -> None:
        self.criterion = nn.CrossEntropyLoss(ignore_index=padding)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.criterion(output, target)  # type: ignore[no-any-return]

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss(output, target)


FIRST, SECOND = Task(1), Task(2)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (with_global, 3),
        (with_attributes, 4),
        (with_module, 5),
        (with_default, 6),
        (partial(with_default), 6),
        (wraps(with_default)(lambda *given: with_default(*given)), 6),
        (with_function, 6),
        (closing_over(7), 7),
        (OwnLoss(8), 8),
        (nn.Sequential(OwnLoss(8)), 8),
        (Task(9), 9),
        (Task(9).loss, 9),
        (lambda output, target: FIRST(output, target) + SECOND(output, target), -100),
        (lambda output, target: F.cross_entropy(output, target, ignore_index=0), 0),
        (lambda output, target: F.cross_entropy(output, target, ignore_index=-1), -1),
        (lambda output, target: F.cross_entropy(output, target, ignore_index=[1, 2][0]), -100),  # nobody knows which
        (lambda output, target: with_global(output, target) + with_default(output, target), -100),  # two of them
        (lambda output, target: output.mean(), -100),
        (F.cross_entropy, -100),
        (nn.MSELoss(), -100),
        (torch.add, -100),
    ],
)
def test_the_class_is_that_of_the_losses_that_are_called(loss: Any, ignored: int) -> None:
    assert ignored_class(loss) == ignored


def test_functions_of_libraries_are_not_looked_into() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    from sklearn.metrics import f1_score, jaccard_score

    for function in (f1_score, jaccard_score, metrics.roc_auc_score, torch.compile, np.mean, max):
        assert ignored_class(function) == -100
        assert ignored_class(lambda output, target, function=function: function(target, output.argmax(1))) == -100
    assert Average(lambda output, target: f1_score(target, output.argmax(1), average="macro")).ignored == -100


def test_a_batch_of_padding_does_not_count_where_a_function_ignores_it() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=0)

    scores = torch.tensor([[0.1, 0.9, 0.2], [0.8, 0.2, 0.3]])
    data = [(scores, torch.tensor([1, 2])), (scores, torch.tensor([0, 0])), (scores, torch.tensor([0, 1]))]
    evaluator = Engine(Update.supervised(loss), model=nn.Identity())
    evaluator.attach(Metrics(own=Average(), function=Average(loss), accuracy=Accuracy()))
    found = evaluator.run(data).metrics
    expected = (loss(*data[0]).item() + loss(*data[2]).item()) / 2
    assert found["own"] == found["function"] == pytest.approx(expected, rel=1e-7)
    assert found["accuracy"] == pytest.approx(1 / 3)
    assert math.isnan(loss(*data[1]).item())
