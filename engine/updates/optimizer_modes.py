"""Optimizers with ``train()`` and ``eval()``, such as schedule-free ones: they train other weights than they evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .optimizers import optimizers_of

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["has_modes", "put_in_training_mode", "weights_to_evaluate"]


def put_in_training_mode(engine: Engine) -> None:
    """Call ``train()`` of the optimizers that have modes: a run begins."""
    for train, _, _ in _with_modes(engine):
        train()


@contextmanager
def weights_to_evaluate(engine: Engine) -> Iterator[None]:
    """Within the block, the model has the weights that its optimizers evaluate: ``eval()`` was called.

    Afterwards it has the very weights again that are trained. Converting them back, as ``train()`` does, would round them, and an
    evaluation or a saved file would change the training.
    """
    found = [] if not engine.training else list(_with_modes(engine))
    trained: list[tuple[Tensor, Tensor]] = []
    for _, evaluate, parameters in found:
        trained += [(parameter, parameter.detach().clone()) for parameter in parameters]
        evaluate()
    try:
        yield
    finally:
        for train, _, _ in found:
            train()
        with torch.no_grad():
            for parameter, value in trained:
                parameter.copy_(value)


def has_modes(engine: Engine) -> bool:
    """Whether an optimizer has weights for evaluations, which it computes from those that it trains."""
    return engine.training and next(_with_modes(engine), None) is not None


def _with_modes(engine: Engine) -> Iterator[tuple[Callable[[], Any], Callable[[], Any], list[Tensor]]]:
    """``train``, ``eval`` and the parameters of each optimizer that has both."""
    for update in engine.updates:
        for optimizer in optimizers_of(update.optimizer):
            train, evaluate = getattr(optimizer, "train", None), getattr(optimizer, "eval", None)
            if callable(train) and callable(evaluate):
                yield train, evaluate, [p for group in optimizer.param_groups for p in group["params"]]
