"""Sharpness-aware minimization (SAM): steps with the gradient at the worst weights nearby."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, UpdateState, on
from signalfire.authoring import Capture, Override, check_bool, check_int, check_name, check_number
from signalfire.core.update import needs_closure
from signalfire.distributed import local_part
from signalfire.runs.restore import Buffers

from ._common.parameters import total_norm
from ._common.updates import selected_updates

__all__ = ["SharpnessAwareMinimization"]


class SharpnessAwareMinimization(Handler):
    """Sharpness-aware minimization (SAM): steps with the gradient at perturbed weights, to find flat minima.

    The gradient g of the accumulation window is computed at the weights w as usual. Then the gradient is computed again at w +
    e(w), where e(w) = rho * g / ||g||; the weights are restored bit for bit, and the optimizer steps with the second gradient.
    Forward and backward thus run twice for each batch of the window, and GRADIENTS_READY is emitted for each of the two
    gradients, so clipping applies to both. Metrics and logs see only the first pass. Buffers keep the values of the first pass,
    so BatchNorm's running statistics belong to the unperturbed weights. Dropout draws a new mask in the second pass.

    Args:
        rho: Norm of the perturbation; 0.05 by default, and 0.5 if adaptive, as in the papers.
        adaptive: Whether to measure the distance relative to the size of each weight (ASAM), so scaling a layer up and the next
            one down makes no difference: ``e(w) = rho * T^2 g / ||T g||`` with ``T = |w| + eta``.
        eta: Constant added to the size of each weight; only for ``adaptive``.
        every: Interval in optimizer steps: the weights are perturbed in every n-th step, and the others are plain steps.
        update: Name of the update whose steps are changed; all by default.

    Raises:
        ValueError: At the start of a run, for an optimizer with a closure such as LBFGS.
        TypeError: For sparse gradients.

    Source:
        Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization" (ICLR 2021); Kwon et al., "ASAM:
        Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural Networks" (ICML 2021).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> def trained(*handlers):
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        ...     engine = Engine(update, model=torch.nn.Linear(1, 1, bias=False))
        ...     _ = torch.nn.init.ones_(engine.model.weight)
        ...     _ = engine.attach(handlers)
        ...     _ = engine.run([(torch.ones(4, 1), torch.zeros(4, 1))], max_epochs=1)
        ...     return engine.model.weight.item()
        >>> # The gradient is 2 at a weight of 1, and 3 at 1.5.
        >>> trained(), trained(SharpnessAwareMinimization(rho=0.5))
        (0.5, 0.25)
    """

    capture = Capture.INSIDE
    trains = True
    decides_alike = True

    def __init__(
        self,
        rho: float | None = None,
        *,
        adaptive: bool = False,
        eta: float = 0.01,
        every: int = 1,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.adaptive = check_bool(self, "adaptive", adaptive)
        self.rho = float(check_number(self, "rho", (0.5 if adaptive else 0.05) if rho is None else rho, above=0))
        self.eta = float(check_number(self, "eta", eta, least=0))
        self.every = check_int(self, "every", every)
        self.update = check_name(self, "update", update)
        self._buffers = Buffers()

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)
        engine.overrides.replace(Override.STEP, self.step, by=self, again=True)
        for update in engine.updates:
            if update.window.held and not update.window.kept:  # left open between two runs: it cannot be recomputed
                update.discard()

    @on(Events.STARTED, reads=["optimizer", "modules"], writes=[])
    def prepare(self, engine: Engine) -> None:
        """Raise an error for optimizers with a closure, and collect the buffers."""
        for update in selected_updates(engine, self.update):
            assert update.optimizer is not None
            if needs_closure(update.optimizer):
                raise ValueError(
                    f"{self.name!r}: the {type(update.optimizer).__name__} of update {update.name!r} computes "
                    "gradients inside its step, with a closure, so the step would not use the gradients at the "
                    f"perturbed weights; use an optimizer without a closure, or detach {self.name!r}"
                )
        self._buffers = Buffers(engine.modules.values())

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Drop the references to the model."""
        self._buffers = Buffers()

    def step(self, engine: Engine, update: UpdateState, step: Callable[[], Any]) -> None:
        """Make the optimizer's step with the gradients at the perturbed weights."""
        if self.update in (None, update.name) and (update.steps + 1) % self.every == 0:
            parameters = [p for p in update.parameters if p.requires_grad and p.grad is not None]
            if parameters:  # else the weights stay where they are, and so do the gradients
                with self._perturbed(parameters), self._buffers.unchanged():
                    update.again()
        step()

    @contextmanager
    def _perturbed(self, parameters: list[Tensor]) -> Iterator[None]:
        """Perturb the weights, and restore them from a copy: subtracting the perturbation would leave rounding errors."""
        with torch.no_grad():
            before = [local_part(p).clone() for p in parameters]
        try:
            with torch.no_grad():
                self._perturb(parameters)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([local_part(p) for p in parameters], before)

    def _perturb(self, parameters: list[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            raise TypeError(
                f"{self.name!r}: sparse gradients cannot be normalized; build the embedding with sparse=False"
            )
        if self.adaptive:
            sizes = torch._foreach_abs(parameters)
            torch._foreach_add_(sizes, self.eta)
            gradients = list(torch._foreach_mul(gradients, sizes))
        scale = self.rho / (total_norm(gradients) + 1e-12)  # no perturbation for a gradient of zero
        if self.adaptive:
            torch._foreach_mul_(gradients, sizes)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            local_part(parameter).addcmul_(local_part(gradient), scale.to(parameter.device))
