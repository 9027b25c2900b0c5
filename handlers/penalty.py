"""Custom penalties: a function whose value is added to the loss."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from signalfire import Engine, UpdateState
from signalfire.core.events import check_receiver

from ._common.penalties import Penalizing, Weight

__all__ = ["Penalty"]


class Penalty(Penalizing):
    """Adds a custom penalty to the loss: ``weight * function(engine)``.

    The reported loss excludes the term, which is a separate metric named like the handler, or "penalty/generator" with several
    updates. The metric is a tensor on its device, so measuring does not synchronize. The function is called for each
    micro-step, as the loss function is. With gradient accumulation, the term has the weight of its micro-step; with
    micro-batching, the function receives single pieces. SAM and LBFGS call the function again, and loss scaling scales the
    term. Several penalties are added in the order of their names, after mixup, label smoothing and distillation. Evaluations
    are not affected.

    Args:
        function: Function called as ``function(engine)`` at LOSS_COMPUTED that returns a scalar tensor. The model is in
            ``engine.model``, the output in ``engine.state.update.output``, the batch in ``engine.state.batch``.
        weight: Factor of the term, negative to increase the function's value; or a function of the update's number of optimizer
            steps, such as ``ParameterScheduling.linear(0.0, 1e-3, over=1000)``. With a factor of 0, the function is not called.
        update: Name of the update to penalize; all by default.

    Raises:
        TypeError: In a run, if the function does not return a scalar tensor.
        ValueError: In a run, if it returns a tensor without gradient.

    Source:
        Zoph et al., "ST-MoE: Designing Stable and Transferable Sparse Expert Models" (2022), for the z-loss of the example,
        which keeps logits small.

    Example:
        >>> import torch
        >>> from signalfire import Update
        >>> update = Update.supervised(torch.nn.functional.cross_entropy, torch.optim.SGD, lr=0.1)
        >>> trainer = Engine(update, model=torch.nn.Linear(4, 3), seed=0)
        >>> def z_loss(engine):
        ...     return engine.state.update.output.logsumexp(1).square().mean()
        >>> _ = trainer.attach(Penalty(z_loss, 1e-4, name="z_loss"))
        >>> _ = trainer.run([(torch.ones(2, 4), torch.tensor([0, 1]))], max_epochs=2)
        >>> 0 < trainer.state.metrics["z_loss"] < 0.01
        tensor(True)
    """

    def __init__(
        self,
        function: Callable[[Engine], Tensor],
        weight: Weight = 1.0,
        *,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, update=update, name=name)
        if not callable(function) or isinstance(function, type):
            raise TypeError(
                f"Penalty(function={function!r}): expected a function that takes the engine and returns a scalar tensor"
            )
        check_receiver(function, "Penalty(function=)", returns=True)
        self.function = function

    def value(self, engine: Engine, update: UpdateState) -> Tensor:
        value = self.function(engine)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(
                f"{self.name!r}: function= returned {found}; expected a floating-point tensor with one element"
            )
        if not value.requires_grad:
            raise ValueError(
                f"{self.name!r}: function= returned a tensor that does not require grad, so the penalty would have no "
                "effect; compute the penalty from parameters or outputs, without detach() or no_grad()"
            )
        return value.reshape(())
