"""L2 regularization: a penalty on the squares of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._common.parameter_penalties import ParameterPenalty
from ._common.penalties import Weight

__all__ = ["L2"]


class L2(ParameterPenalty):
    """L2 regularization (ridge): adds ``weight / 2 * sum(p ** 2)`` to the loss, which pulls weights toward zero.

    Each gradient grows by ``weight * p``. With SGD, this equals the optimizer's ``weight_decay=weight``. Adaptive optimizers
    such as Adam divide this gradient by their second moment, like any other gradient, and clipping includes it; AdamW's
    decoupled weight decay, by contrast, is part of the optimizer. The reported loss excludes the penalty, which is a separate
    metric named like the handler.

    Args:
        weight: Factor, 0 or more; or a function of the update's number of optimizer steps.
        parameters: Name patterns of the penalized parameters, such as ``"head.*"`` or ``["*.weight"]``; by default all in the
            update's optimizer. Parameters that are frozen at the time are left out.
        norms_and_biases: Whether to include biases and the parameters of normalization layers: all with fewer than two
            dimensions. ``print(handler)`` shows which parameters are left out.
        update: Name of the update to penalize; by default all, each separately.

    Raises:
        ValueError: At the start of a run, if no parameter is left to penalize, or if the parameters are sharded.

    Source:
        Hoerl and Kennard, "Ridge Regression: Biased Estimation for Nonorthogonal Problems" (Technometrics, 1970); Loshchilov and
        Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019) for the difference from weight decay.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=1.0)
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight.data = torch.tensor([[4.0, -1.0]])
        >>> engine = Engine(update, model=model, seed=0)
        >>> _ = engine.attach(L2(0.5))
        >>> # Without the penalty, the gradient is zero.
        >>> state = engine.run([(torch.zeros(4, 2), torch.zeros(4, 1))], max_epochs=1)
        >>> state.metrics["l2"], model.weight.tolist()
        (tensor(4.2500), [[2.0, -0.5]])
    """

    factor = 0.5

    def __init__(
        self,
        weight: Weight,
        *,
        parameters: str | Sequence[str] | None = None,
        norms_and_biases: bool = False,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, parameters=parameters, norms_and_biases=norms_and_biases, update=update, name=name)

    def size(self, parameter: Tensor) -> Tensor:
        return (torch.view_as_real(parameter) if parameter.is_complex() else parameter).square().sum()
