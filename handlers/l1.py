"""L1 regularization: a penalty on the absolute values of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._common.parameter_penalties import ParameterPenalty
from ._common.penalties import Weight

__all__ = ["L1"]


class L1(ParameterPenalty):
    """L1 regularization (lasso): adds ``weight * sum(|p|)`` over the parameters to the loss, which pulls weights toward zero.

    Each gradient grows by ``weight * sign(p)``. The reported loss excludes the penalty, which is a separate metric named like the
    handler. Adaptive optimizers such as Adam divide this gradient by their second moment, like any other gradient. Weights become
    small, but few become exactly zero; `Pruning` sets weights to zero.

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
        Tibshirani, "Regression Shrinkage and Selection via the Lasso" (Journal of the Royal Statistical Society B, 1996).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=1.0)
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight.data = torch.tensor([[4.0, -1.0]])
        >>> engine = Engine(update, model=model, seed=0)
        >>> _ = engine.attach(L1(0.5))
        >>> # Without the penalty, the gradient is zero.
        >>> state = engine.run([(torch.zeros(4, 2), torch.zeros(4, 1))], max_epochs=1)
        >>> state.metrics["l1"], model.weight.tolist()
        (tensor(2.5000), [[3.5, -0.5]])
    """

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
        return parameter.abs().sum()
