"""scikit-learn's checks of estimators: the example's, and beside it skorch's with a network of the same kind."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.utils.estimator_checks import check_estimator
from torch import Tensor, nn

from .outcomes import Outcome

__all__ = ["of_example", "of_skorch"]

EXAMPLES = str(Path(__file__).parents[2] / "examples")


def checked(estimator: Any) -> list[Outcome]:
    """The outcome of each check; one that skips itself is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(estimator, on_fail=None, on_skip=None)
    return [
        Outcome(one["check_name"], None if one["status"] == "passed" else repr(one["exception"])[:150])
        for one in found
        if one["status"] != "skipped"
    ]


def of_example() -> list[Outcome]:
    """The checks of the estimator in examples/sklearn_estimator.py."""
    sys.path.insert(0, EXAMPLES)
    try:
        return checked(importlib.import_module("sklearn_estimator").NetClassifier())
    finally:
        sys.path.remove(EXAMPLES)


class Network(nn.Module):
    """The network of the example; its sizes are found with the first batch, since skorch does not tell them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(8))

    def forward(self, X: Tensor) -> Tensor:
        outputs: Tensor = self.layers(X.float())
        return outputs


def of_skorch() -> list[Outcome]:
    """The checks of skorch's classifier with this network; of one of its own, so that it gets what the example has."""
    from skorch import NeuralNetClassifier

    options: dict[str, Any] = {"optimizer": torch.optim.Adam, "lr": 0.01, "max_epochs": 30, "batch_size": 32}
    net = NeuralNetClassifier(
        Network, criterion=nn.CrossEntropyLoss, **options, iterator_train__shuffle=True, train_split=None, verbose=0
    )
    return checked(net)
