"""Sharpness-aware minimization: each step with the gradient at the worst weights nearby."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, UpdateState, on
from signalfire.acts import Override
from signalfire.checks import check_bool, check_int, check_number
from signalfire.distributed import local_part
from signalfire.restore import Buffers
from signalfire.update import needs_closure

from ._common.parameters import total_norm
from ._common.updates import updates_meant

__all__ = ["SharpnessAwareMinimization"]


class SharpnessAwareMinimization(Handler):
    """Looks for flat minima: a step uses the gradient that the window's batches have at weights moved uphill by ``rho``.

    The window's gradient g is computed at the weights w as ever. Then it is computed again at w + e(w), where
    e(w) = rho * g / ||g||, the weights are put back bit for bit, and the optimizer makes its step with the second gradient. The
    forward and the backward are thus made twice, also of each batch of an accumulation window, and GRADIENTS_READY comes for
    each of the two: clipping holds for both. Metrics and logs see the first. So do buffers: BatchNorm's running statistics
    are those of the weights that stay. Dropout draws anew in the second evaluation.

    Args:
        rho: how far the weights are moved, as a norm; 0.05 by default, and 0.5 if adaptive, as in the papers.
        adaptive: measure the distance relative to each weight's size (ASAM), so that scaling a layer up and the next one down
            makes no difference: e(w) = rho * T^2 g / ||T g|| with T = |w| + eta.
        eta: see adaptive, which alone uses it.
        every: look ahead in every n-th optimizer step only, the other steps being plain.
        update: the name of the update whose steps look ahead; all by default.

    Raises:
        ValueError: at the start of a run, for an optimizer with a closure such as LBFGS.
        TypeError: for sparse gradients.

    Source:
        Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization" (ICLR 2021); Kwon et al., "ASAM:
        Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural Networks" (ICML 2021).

    Example:
        >>> SharpnessAwareMinimization(adaptive=True).rho
        0.5
    """

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
        self.update = update
        self._buffers = Buffers()

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)
        engine.overrides.replace(Override.STEP, self.step, by=self, again=True)
        for update in engine.updates:
            if update.window.held and not update.window.kept:  # left open between two runs: it cannot be recomputed
                update.discard()

    @on(Events.STARTED)
    def prepare(self, engine: Engine) -> None:
        """Refuse optimizers with a closure; find the buffers."""
        for update in updates_meant(engine, self.update):
            assert update.optimizer is not None
            if needs_closure(update.optimizer):
                raise ValueError(
                    f"{self.name!r}: the {type(update.optimizer).__name__} of update {update.name!r} computes gradients "
                    "inside its own step, by a closure, and would not use those at the moved weights; take an optimizer "
                    f"without a closure, or detach {self.name!r}"
                )
        self._buffers = Buffers(engine.modules.values())

    @on(Events.ENDED)
    def finish(self, engine: Engine) -> None:
        """Let go of the model."""
        self._buffers = Buffers()

    def step(self, engine: Engine, update: UpdateState, step: Callable[[], Any]) -> None:
        """The optimizer's step, with the gradients at the moved weights."""
        if self.update in (None, update.name) and (update.steps + 1) % self.every == 0:
            parameters = [p for p in update.parameters if p.requires_grad and p.grad is not None]
            with self._moved(parameters), self._buffers.unchanged():
                update.again()
        step()

    @contextmanager
    def _moved(self, parameters: list[Tensor]) -> Iterator[None]:
        """The weights moved uphill; then put back from a copy, since subtracting what was added would leave rounding errors."""
        with torch.no_grad():
            before = [local_part(p).clone() for p in parameters]
        try:
            with torch.no_grad():
                self._move(parameters)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([local_part(p) for p in parameters], before)

    def _move(self, parameters: list[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            raise TypeError(
                f"{self.name!r}: sparse gradients cannot be normalized; build the embedding with sparse=False"
            )
        if not gradients:
            return
        if self.adaptive:
            sizes = torch._foreach_abs(parameters)
            torch._foreach_add_(sizes, self.eta)
            gradients = list(torch._foreach_mul(gradients, sizes))
        scale = self.rho / (total_norm(gradients) + 1e-12)  # a gradient of zero moves nothing
        if self.adaptive:
            torch._foreach_mul_(gradients, sizes)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            local_part(parameter).addcmul_(local_part(gradient), scale.to(parameter.device))
